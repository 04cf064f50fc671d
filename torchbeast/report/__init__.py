"""How a run shows itself: on the terminal, in TensorBoard, in CSV files."""

from torchbeast.report.reporter import Reporter
from torchbeast.report.terminal import log_to_terminal

__all__ = ["Reporter", "log_to_terminal"]
