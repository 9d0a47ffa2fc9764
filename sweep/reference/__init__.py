"""Pages of docs/reference, generated from declarations.

Imported by: cli alone, when it writes the pages. Start at pages.py; schema_text.py puts a JSON Schema into words.
"""
