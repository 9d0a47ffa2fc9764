"""Tests and intervals of differences.

Imported by: reports alone; no SweepData is read here: arrays in, numbers out.
Start at paired_tests.py.
"""
