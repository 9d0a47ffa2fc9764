"""Device code in Triton's Gluon, for Hopper, that polar and forgetting attention share.

Imported by: the gluon.py of polar, forgetting and wall attention.
Start at forward.py; host.py runs on the processor, shared.py is what both device files need.
"""
