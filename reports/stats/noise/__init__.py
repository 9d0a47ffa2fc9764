"""Run-to-run noise, detectable differences, power, and the probability of being best.

Imported by: reports only.
Start at run_noise.py.
"""
