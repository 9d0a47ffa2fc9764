"""This machine: its hardware, the allocation of it to attempts, GPU locks, processes and signals.

May import config.py, errors.py, units.py and results; every package of sweep above may import it.
Start reading at hardware.py (resources), allocation.py (their allocation to attempts) and processes.py.
"""
