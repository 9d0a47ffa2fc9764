"""The page of a sweep served to this machine, which follows the sweep.

Imported by: the command dashboard alone.
Start at serve.py.
"""
