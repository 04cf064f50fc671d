"""The algorithm: V-trace, losses, one update; and modules that code for TorchBeast imports."""
