"""Depthwise causal convolutions: the ops and their Triton kernels.

Imported by: the model's blocks and layers, model/mixers/path.py, sweep/bench, sweep/doctor.
Start at op.py.
"""
