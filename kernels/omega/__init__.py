"""Omega memory: the op, a step-by-step reference, custom ops, and Triton kernels.

Imported by: model/memory/omega.py, sweep/bench, sweep/probes.
Start at reference.py, then op.py; scan.py is the part that runs sequentially over chunks.
"""
