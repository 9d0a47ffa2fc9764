"""Position schemes at the embedding: each part's settings and module in one file.

Only model/registry.py imports them; start with ape.py.
"""
