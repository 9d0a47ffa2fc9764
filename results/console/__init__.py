"""Standard streams, text, tables, options and files: what commands print and write, and how words are understood.

Imports only results/errors, results/names and results/metrics; every other package may import it.
Start with text.py, then streams.py and output_files.py.
"""
