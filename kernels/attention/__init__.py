"""Causal attention, one package per operation; scored.py holds the plain torch path that most of them share.

Imports only modules directly under kernels/. Start with softmax/op.py; launcher.py holds what the kernels share.
"""
