"""Sentences of the papers, each bound to the query that decides it.

Imported by: the table and the dashboard alone.
Start at paper_claims.py.
"""
