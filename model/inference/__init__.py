"""Decoding: decoders that continue texts token by token, and the drawing of tokens.

sweep/ may import it; start with decode.py; generation.py draws tokens with it.
"""
