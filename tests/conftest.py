"""For all tests: `make test` runs them in two processes, the long ones first."""

import pytest
import torch

torch.set_num_threads(1)  # the other cores are busy with other tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Short tests at the end keep all processes busy until it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
