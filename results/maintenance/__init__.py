"""Looking after a database: copies, checks, and numbers that were a mistake."""
