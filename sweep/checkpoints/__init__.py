"""Checkpoints and kept weights: storage, seals, and what may be removed.

May import sweep.errors, sweep.units, model and results; only checkpoint.py imports torch.
Start reading in storage.py (places), then checkpoint.py; prune.py and garbage.py are commands.
"""
