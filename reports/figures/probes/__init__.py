"""The figures of single probes that are not about context lengths alone: what their items say.

Reached by way of the registry in figures/__init__.py.
Start at passkey.py; maps of cells share heat_maps.py, lines panels.py.

Nothing else imports them.
"""
