"""The database: its tables, who writes them, who reads them.

Imports results/console and the records at the root of results; every other package may import it, reports only its records and Store.
Start with schema.py, then store.py for what is written and store_reader.py for what can be asked.
"""
