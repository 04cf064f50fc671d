"""The frame around training runs."""

import pytest

from torchbeast.errors import UsageError
from torchbeast.training import only_run_in


def test_two_runs_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "new" / "run"
    with only_run_in(folder):
        with only_run_in(tmp_path / "other", patience_s=0):
            pass
        with (
            pytest.raises(UsageError, match=r"Another run is at work in .*another --xpid"),
            only_run_in(folder, patience_s=0.3),
        ):
            pass
    with only_run_in(folder, patience_s=0):
        pass
