"""Attention of one new token a text over keys and values that lie in pages."""
