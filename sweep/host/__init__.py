"""This machine: what it has, who holds which part of it, its processes and their signals."""
