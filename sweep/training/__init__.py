"""The training loop, optimizers, learning-rate schedule, loss scaling and FLOPs.

May import sweep.data, sweep.checkpoints, model and kernels; attempts, planning (flops.py alone) and bench import it.
Start reading in loop.py.
"""
