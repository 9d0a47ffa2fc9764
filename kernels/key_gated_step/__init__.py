"""Decoding step of Wall attention over plain keys, from which the gates are projected: the op and its Triton kernels.

Imported by: model/mixers/wall.py while it decodes with gates from keys, sweep/bench.
Start at op.py; kernels/wall_step has the form whose keys hold their own decay.
"""
