"""Attention with contextual positions (CoPE): the op and its Triton kernels.

Imported by: model/mixers/biased.py, sweep/bench. Start at op.py, whose `position_scores` is the formula.
"""
