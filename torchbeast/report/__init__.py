"""A run's reports: on the terminal, in TensorBoard, in CSV files."""

from torchbeast.report.reporter import Reporter, say_nothing
from torchbeast.report.terminal import log_to_terminal

__all__ = ["Reporter", "log_to_terminal", "say_nothing"]
