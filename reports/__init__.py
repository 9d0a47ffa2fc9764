"""Tables, figures, the dashboard and status: everything that people read from the database.

Imported by: cli.py. Imports results alone, neither torch nor Ray.
Start at sweep_data.py (what is read), table_builder.py (tables) and report_request.py (the command).
"""
