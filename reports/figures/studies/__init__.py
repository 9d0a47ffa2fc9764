"""The figures of studies: a file each.

Reached by way of the registry in figures/__init__.py.
Start at history.py; settings as axes are in settings.py.

Nothing else imports them.
"""
