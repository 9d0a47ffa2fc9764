"""Gated delta rule: the op, its custom ops, and Triton kernels.

Imported by: the other delta rules, kernels/omega, model/memory/gated_delta.py, model/block.py, sweep/bench,
sweep/doctor, sweep/probes.
Start at op.py, which holds the chunked form in torch too.
"""
