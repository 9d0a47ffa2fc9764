"""Claims of papers, each checked by a query of a sweep's numbers.

Imported by: the table `claims` and the dashboard.
Start at paper_claims.py.
"""
