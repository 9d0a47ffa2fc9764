"""Wall attention: the op, its Triton kernels, and a forward in Gluon for Hopper.

Imported by: model/mixers/wall.py, sweep/bench.
Start at op.py.
"""
