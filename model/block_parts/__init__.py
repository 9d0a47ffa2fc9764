"""Block parts: the layers of flash-linear-attention, found by reading its source.

Imported by: registry.py, the names from fla_catalogue.py and the parts by name from fla_part.py.
Their costs and sizes are in fla_costs.py. Start at fla_part.py; block.py holds the layer around a block part.
"""
