"""Probes that look inside a network: attention maps, count maps, gates, and the contents of its memory.

May import sweep.probes, sweep.data and model; the registry in sweep/probes/__init__.py names each file. Start reading
in gates.py; memory_state.py is the only file here that imports torch at its top.
"""
