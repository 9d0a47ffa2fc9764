"""Checkpoints and final weights: formats, storage backends and removal.

May import sweep.errors, model and results; only checkpoint.py imports torch. Start reading in storage.py
(storage locations), then checkpoint.py; prune.py and garbage.py are commands.
"""
