"""The results database: its tables, its writers and its readers.

This package imports only results/console and the records at the root of results. Every other package may import it;
reports imports only its records and Store. Start with schema.py, then read store.py for writes and store_reader.py for
queries.
"""
