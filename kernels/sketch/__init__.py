"""Projections of activations on a few directions: the op and its Triton kernels.

Imported by: model/backbone.py, model/regularizers.py.
Start at op.py.
"""
