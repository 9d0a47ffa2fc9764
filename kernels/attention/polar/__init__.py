"""Polar attention: the op, naive references, Triton kernels, and Gluon kernels for Hopper.

Imported by: kernels/paged, model/mixers/polar.py, sweep/bench, sweep/doctor.
Start at reference.py, the formula; op.py folds the null in last.
"""
