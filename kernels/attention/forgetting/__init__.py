"""Forgetting attention: the op, its Triton kernels, and a forward in Gluon for Hopper.

Imported by: model/mixers/fox.py, model/mixers/biased.py, sweep/bench.
Start at op.py; triton.py and gluon.py are softmax and polar attention's kernels with a gate.
"""
