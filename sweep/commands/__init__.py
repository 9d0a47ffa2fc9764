"""Commands that need more than one call: parse, call one function, print.

May import all of sweep and results; only cli.py imports them.
Start at runs.py: launch, status, evaluate and their kin; options.py holds options that several commands share.
"""
