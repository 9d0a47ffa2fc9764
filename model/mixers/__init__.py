"""Cores of the global layers, one file each."""
