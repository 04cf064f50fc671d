"""IMPALA in PyTorch: `monobeast` on one machine in pure Python."""
