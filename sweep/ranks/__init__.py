"""Several processes of one attempt, one per GPU: their group, shared decisions, and collective sums.

May import errors.py and host; training, probes and attempts import it. Start reading in group.py (collective work)
and launcher.py (processes).
"""
