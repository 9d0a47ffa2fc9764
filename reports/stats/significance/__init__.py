"""Hypothesis tests and confidence intervals of paired differences, accuracies and linear models.

Imported by: reports only. Nothing here reads a SweepData: arrays in, numbers out.
Start at paired_tests.py.
"""
