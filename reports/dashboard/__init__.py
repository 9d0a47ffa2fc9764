"""The dashboard: one HTML file of a whole sweep, and server/, which serves it.

Imported by: commands.py and the report of a folder.
Start at page.py.
"""
