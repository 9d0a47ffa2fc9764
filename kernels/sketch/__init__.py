"""Projections on a few directions."""
