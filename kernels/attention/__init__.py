"""Attention over all keys or a window: Polar and softmax, naive, in Triton and in Gluon."""
