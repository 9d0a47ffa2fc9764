"""Text views of sweeps and cells: status, show and status --watch. Imports neither torch, ray nor pandas.

Imported by: commands.py and the dashboard.
Start at status.py.
"""
