"""Device code in Triton's Gluon, for Hopper, that polar and forgetting attention share."""
