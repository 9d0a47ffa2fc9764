"""Trained cells as folders of Hugging Face transformers.

May import sweep.attempt and sweep.data; only commands import it. The classes that load a folder are in hf.py of the
root. Start reading in huggingface.py.
"""
