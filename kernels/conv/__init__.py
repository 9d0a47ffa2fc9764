"""Depthwise causal convolutions."""
