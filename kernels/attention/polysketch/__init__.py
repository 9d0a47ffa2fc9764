"""PolySketch attention: polynomial weights, exact within blocks and sketched across them, in plain torch.

Imported by: model/mixers/polysketch.py.
Start at op.py.
"""
