"""One training run: data, optimizers, schedule, loop, checkpoints."""
