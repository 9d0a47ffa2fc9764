"""Position schemes at the embedding: each part's settings and module in one file.

Imported by: model/registry.py alone.
Start at ape.py.
"""
