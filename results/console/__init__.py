"""Console output, files and cores: standard streams, sanitized text, tables, shared options, completion, atomic writes.

This package imports only results/errors, results/names and results/metrics; every other package may import it. Start
with text.py, then streams.py and output_files.py.
"""
