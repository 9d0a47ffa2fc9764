"""Decoding: the cache of keys, values and memories, and the decoders that continue texts token by token.

sweep/ may import it; start with decode.py; generation.py draws tokens with it.
"""
