"""TensorBoard event files beside the CSV."""

from pathlib import Path

from torchbeast.report.figures import tag_of


class TensorBoard:
    """Writes each figure as a scalar over environment steps."""

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import: only where it is used

        # After a resume, what an earlier run wrote beyond its last checkpoint is taken back.
        self._writer = SummaryWriter(str(directory), purge_step=first_step or None)

    def log(self, figures: dict[str, float | int | None], step: int) -> None:
        for name, value in figures.items():
            if value is not None and name != "step":
                self._writer.add_scalar(tag_of(name), value, step)

    def close(self) -> None:
        self._writer.close()
