"""This machine: what it has, who holds which part of it, its processes and their signals.

May import config.py, errors.py, units.py and results; every package of sweep above may import it.
Start reading at hardware.py (what there is), allocation.py (who gets which part) and processes.py.
"""
