"""Figures of single probes, which show their items rather than a number over context lengths.

They are imported by way of the registry in figures/__init__.py, helpers by gates/ too. Start at passkey.py; maps
of cells share heat_maps.py, lines panels.py.
"""
