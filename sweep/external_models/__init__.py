"""External open-weight models, measured by the same probes as the project's own cells.

May import sweep.data, sweep.probes and sweep.grid; attempts and `evaluate` import it, transformers is imported when
needed. Start reading in hub_checkpoint.py, then subject.py.
"""
