"""Mixers of the global layers: each part's settings, FLOPs and module in one file.

Only model/registry.py and code that needs one mixer by name import them; start with softmax.py, the plainest.
"""
