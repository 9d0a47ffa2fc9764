"""Figures of studies, one file each.

They are imported by way of the registry in figures/__init__.py; nothing else imports them. Start at history.py;
settings as axes are in settings.py.
"""
