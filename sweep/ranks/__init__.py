"""Processes (ranks) of one attempt: group, decisions, divided sums.

May import errors.py; training, probes, attempts and the launcher of processes import it. Start reading in group.py.
"""
