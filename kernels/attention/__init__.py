"""Causal attention, one package per operation; scored.py holds the plain torch path that most of them share.

Imported by: model/mixers, kernels/paged, sweep/bench, sweep/doctor; imports only modules directly under kernels/.
Start at softmax/op.py; launcher.py holds what the kernels share.
"""
