"""Decoding: decoders that continue texts token by token, and the drawing of tokens.

Imported by: sweep/.
Start at decode.py; generation.py draws tokens with it.
"""
