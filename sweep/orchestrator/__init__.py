"""Launches of a grid: supervisor loop, retries, logs, display, control.

May import planning, executors, attempt and all below; commands, doctor and bench import it.
Start reading at launch.py (one launch), then supervisor.py (its loop) and retries.py (decisions after a failure).
"""
