"""The spread between runs that ought to agree, and what follows from it: power, and the probability of being best.

Imported by: reports alone.
Start at run_noise.py.
"""
