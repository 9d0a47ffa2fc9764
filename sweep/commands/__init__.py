"""Commands, a file per group: each parses its options, calls one function, prints.

Imported by: cli. What an option means stands in the section `Args:` of its command's docstring.
Start at runs.py (launch to doctor), then launch.py; options.py holds what several commands take.
"""
