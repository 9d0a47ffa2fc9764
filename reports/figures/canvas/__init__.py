"""Parts that figures share: data, options, drawing helpers, labels, axes and lines over lengths.

Imported by: figures, and the commands that write or check one.

Start at base.py and drawing.py.
"""
