"""Head, soft cap and cross-entropy in one op, and its Triton kernel.

Imported by: model/backbone.py, sweep/bench, sweep/doctor.
Start at op.py.
"""
