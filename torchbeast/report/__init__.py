"""How a run shows itself: on the terminal, in TensorBoard, in CSV files."""

from torchbeast.report.reporter import Reporter

__all__ = ["Reporter"]
