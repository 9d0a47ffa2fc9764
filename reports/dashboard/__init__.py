"""Dashboard: one HTML file of a complete sweep, and server/, which serves it.

Imported by: commands.py and the report of a folder.

Start at page.py.
"""
