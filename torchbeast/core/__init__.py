"""What MonoBeast and PolyBeast share: V-trace, losses, the learner's step, checkpoints, logs."""
