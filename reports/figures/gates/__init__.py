"""Figures of what gates leave in a cache.

They are imported by way of the registry in figures/__init__.py; nothing else imports them. Start at evictable_keys.py.
"""
