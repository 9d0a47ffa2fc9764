"""Pages of docs/reference, generated from declarations, and the list of parts.

Imported by: cli alone, when it writes the pages or lists parts. Start at pages.py, or at part_list.py for the command;
schema_text.py puts a JSON Schema into words.
"""
