"""Decoding: key-value caches, steps of one token, generation."""
