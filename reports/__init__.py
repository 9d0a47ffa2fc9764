"""From the database to tidy frames and tables."""
