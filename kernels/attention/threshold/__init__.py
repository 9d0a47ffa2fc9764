"""Threshold relative attention: the op and its Triton kernels.

Imported by: model/mixers/tra.py, sweep/bench.
Start at op.py, whose `survivors` says which keys count.
"""
