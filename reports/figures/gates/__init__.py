"""Figures of what gates leave in a cache.

Imported by name, as FIGURES of the package above says. Each file has `collect` and `draw`.
"""
