"""Drawing that figures share: style, options, labels, axes, lines over lengths, files and reading them back.

Imported by: figures, and the commands that write or check one.
Start at drawing.py.
"""
