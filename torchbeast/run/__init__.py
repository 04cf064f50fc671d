"""A run: its flags and recipes, where its environments come from, checkpoints, signals, tests."""
