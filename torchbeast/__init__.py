"""IMPALA in PyTorch: `monobeast` on one machine in pure Python."""

__version__ = "0.1.0"
