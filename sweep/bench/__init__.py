"""Benchmarks of kernels, training steps, decoding, entire cells and large sweeps.

May import everything in sweep, model and kernels; nothing but the command line and `plan --calibrate` imports it. Start
reading in commands.py: each benchmark is a module with `run` and `table`.
"""
