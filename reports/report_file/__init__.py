"""Report files: a YAML file that lists the tables and figures of an appendix, and the command that builds it.

Imported by: reports/report_request.py. Start at schema.py.
"""
