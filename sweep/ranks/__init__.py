"""Several processes of one attempt, one per GPU: their group, shared decisions, and collective sums.

May import errors.py; training, probes, attempts and the launcher of processes import it. Start reading in group.py.
"""
