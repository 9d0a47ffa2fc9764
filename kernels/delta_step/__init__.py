"""Decoding step of the delta rules: the op and its Triton kernel.

Imported by: model/memory/gated_delta.py while it decodes.
Start at op.py; kernels/gated_delta has the same over whole texts.
"""
