"""Mixers of the global layers: each part's settings, FLOPs and module in one file.

Imported by: model/registry.py and code that needs one mixer by name.
Start at softmax.py, the plainest.
"""
