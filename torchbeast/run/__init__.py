"""A run: flags, recipes, sources of environments, checkpoints, signals, evaluation."""
