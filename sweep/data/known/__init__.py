"""Corpora that are known by name: texts of the hub and of this machine, and rows that are worked out.

May import the files of sweep/data, sweep.config and model; the registry beside this folder lists each class.
Start reading in local.py.
"""
