"""Built-in corpora: text of the hub and of this machine, and computed rows.

May import the files of sweep/data, sweep.config and model; the registry in sweep/data/registry.py lists each class.
Start reading in local.py.
"""
