"""Commands, one module per group: each parses its options, calls one function and prints.

Imported by: cli. The meaning of an option is in the section `Args:` of its command's docstring.
Start at runs.py (launch to doctor), then launch.py; options.py has the options that several commands share.
"""
