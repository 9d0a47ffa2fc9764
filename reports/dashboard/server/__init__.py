"""Local server of a dashboard page that follows a running sweep.

Imported by: the command dashboard alone.

Start at serve.py.
"""
