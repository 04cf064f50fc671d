"""The algorithm: V-trace, losses, one update; and what code for TorchBeast knows here."""
