"""Recurrent memories beside a mixer: each part's settings, FLOPs and module in one file.

Imported by: model/registry.py and code that needs one memory by name.
Start at recurrent.py, their common base.
"""
