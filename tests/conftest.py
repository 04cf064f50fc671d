"""For all tests: `make test` runs them in several processes, the long ones first."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the other cores are busy with other tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Short tests at the end keep all processes busy until it."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def token(tmp_path: Path):
    """For a learner and its clients, who share a secret."""
    from libtorchbeast.rpc.security import Security  # which many tests do without
    from tests.helpers.certificates import write_secret

    return Security(token_file=write_secret(tmp_path / "token", "secret"))
