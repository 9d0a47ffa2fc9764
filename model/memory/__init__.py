"""Recurrent memories beside a mixer: each part's settings, FLOPs and module in one file.

Only model/registry.py and code that needs one memory by name import them; start with recurrent.py, their common base.
"""
