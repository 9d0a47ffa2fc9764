"""What is kept of a training: checkpoints and weights, where they lie, and what may be removed."""
