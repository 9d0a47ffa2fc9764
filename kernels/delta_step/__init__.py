"""One decoding step of the delta rules: the op and its Triton kernel."""
