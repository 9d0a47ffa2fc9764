"""Corpora that are known by name, a file each; the registry beside this folder lists them."""
