"""PolySketch attention: polynomial weights, exact within blocks and sketched across them; its op and its Triton kernels.

Imported by: model/mixers/polysketch.py, sweep/bench.
Start at op.py.
"""
