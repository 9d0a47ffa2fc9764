"""A launch from its plan to its end: the supervisor, retries, logs, and what people ask of it meanwhile.

May import planning, executors, attempt and all below; commands, doctor and bench import it.
Start reading at launch.py (one launch), then supervisor.py (its loop) and retries.py (what follows a failure).
"""
