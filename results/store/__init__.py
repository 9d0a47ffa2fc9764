"""The database: its tables, who writes them, who reads them."""
