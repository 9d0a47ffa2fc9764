"""Tables, figures, the dashboard and status: everything that people read from the database.

Imported by: cli.py. Imports results only, neither torch nor Ray.
Start at sweep_data.py (data of a sweep), table_builder.py (tables) and report_request.py (the command).
"""
