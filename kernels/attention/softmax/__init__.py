"""Softmax attention: the op, and the Triton kernels that polar and forgetting attention build on.

Imported by: the ops of other attentions, model/mixers/softmax.py, model/mixers/diff.py, sweep/bench, sweep/doctor.
Start at op.py.
"""
