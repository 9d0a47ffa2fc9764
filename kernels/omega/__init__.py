"""Memories that learn the pairs of a sliding window by the gradient of its loss."""
