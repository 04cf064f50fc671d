"""Several learners: the same updates as one with all their rollouts, and the same on all ranks."""

import pytest
import torch

from tests.helpers.rank_cases import CASES, ONLY_ALIKE, num_updates, run_case
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TIMEOUT_S

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.fixture(scope="module", params=[2, 3])
def of_ranks(request, tmp_path_factory):
    """What each of so many learners has at the end of all cases."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    texts = run_ranks(size, folder, "tests.helpers.rank_cases", str(folder))
    assert not any("Warning" in text for text in texts), texts
    return [torch.load(folder / f"{rank}.tar", weights_only=True) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", CASES)
def test_several_learners_make_the_updates_of_one(name, of_ranks):
    first, *others = [results[name] for results in of_ranks]
    for other in others:
        assert_same(other["state"], first["state"], exact=True)
    if name in ONLY_ALIKE:
        assert first["state"]["stats"]["updates"] == num_updates(name, len(of_ranks))
        return
    alone = run_case(name, len(of_ranks))
    assert_same(first["state"], alone["state"])
    for figure, value in alone["figures"].items():
        if figure not in ("effective_sample_size", "explained_variance"):  # means of the ranks'
            assert first["figures"][figure] == pytest.approx(value, rel=1e-3, abs=1e-4), figure


def assert_same(ours, theirs, exact=False, path=""):
    """Nested states of learners: weights, optimizer, statistics, counts."""
    if "norm.running_var" in path and not exact:
        return  # of batches, as PyTorch has it; the mean over ranks lacks what lies between them
    if isinstance(theirs, torch.Tensor):
        limits = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(ours, theirs, **limits, msg=lambda text: f"{path}: {text}")
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        for key in theirs:
            assert_same(ours[key], theirs[key], exact, f"{path}/{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        pairs = zip(sorted_if_numbers(ours), sorted_if_numbers(theirs), strict=True)
        for i, (our, their) in enumerate(pairs):
            assert_same(our, their, exact, f"{path}/{i}")
    else:
        assert ours == (theirs if exact else pytest.approx(theirs)), path


def sorted_if_numbers(items):
    """Episodes come in another order: rank by rank."""
    return sorted(items) if all(isinstance(item, float | int) for item in items) else items
