"""Looking after a database: copies, checks, deletion, names, tags and notes.

Imports results/store and results/exchange; only commands and results/__init__.py may import it.
Start with check.py, whose steps are the files beside it, and deletion.py.
"""
