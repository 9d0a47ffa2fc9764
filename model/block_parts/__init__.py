"""Block parts: the layer around one, and the layers of flash-linear-attention as block parts.

Imported by: the network's blocks (layer.py), and registry.py by name (fla_part.py).
Start at layer.py.
"""
