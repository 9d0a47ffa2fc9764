"""This machine: hardware, allocation, GPU locks, processes, signals.

May import config.py, errors.py and results; every package of sweep above may import it.
Start reading at hardware.py (resources), allocation.py (their allocation to attempts) and processes.py.
"""
