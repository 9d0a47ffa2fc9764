"""Processes (ranks) of one attempt: group, decisions, divided sums.

May import errors.py and host; training, probes and attempts import it. Start reading in group.py (collective work)
and launcher.py (processes).
"""
