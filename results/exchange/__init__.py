"""Sweeps for other places and programs: bundles out and in, tables, trackers."""
