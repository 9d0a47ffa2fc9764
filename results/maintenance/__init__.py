"""Maintenance of a database: backups, checks, deletion, names, tags and notes.

This package imports results/store and results/exchange; only commands and results/__init__.py may import it. Start with
check.py, whose steps are the other files of this folder, and deletion.py.
"""
