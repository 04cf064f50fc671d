"""A new run from the weights of another."""

import itertools

import pytest
import torch
from torch import nn

from tests.helpers.specs import spec_for
from torchbeast.errors import UsageError
from torchbeast.models import make_model
from torchbeast.models.agent import Net
from torchbeast.run.init_from import init_from


def save(path, model):
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = {"model_state_dict": model.state_dict(), "stats": {"step": 7}, "flags": {}}
    torch.save(contents, path)


@pytest.mark.parametrize("source", ["run", "{savedir}/run", "{savedir}/run/model.tar"])
def test_a_name_a_folder_or_a_file_give_their_weights(tmp_path, source):
    theirs, ours = (make_model("mlp", spec_for((4,), 2), use_lstm=True) for _ in range(2))
    path = tmp_path / "run" / "model.tar"
    save(path, theirs)
    said = init_from(source.format(savedir=tmp_path), tmp_path, ours)
    num = len(ours.state_dict())
    assert said == f"{num} of {num} tensors have the weights of {path}."
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


def test_tensors_of_other_shapes_stay_as_they_are_and_are_named(tmp_path):
    theirs, ours = (
        make_model("mlp", spec_for((4,), 2), False),
        make_model("mlp", spec_for((4,), 3), False),
    )
    save(tmp_path / "run" / "model.tar", theirs)
    policy = ours.policy.weight.clone()
    said = init_from("run", tmp_path, ours)
    assert (
        "keep their initial values: policy.weight is [2, 128] there, [3, 128] here; policy.b"
        in said
    )
    assert torch.equal(ours.policy.weight, policy)
    assert torch.equal(ours.baseline.weight, theirs.baseline.weight)


def test_weights_that_fit_nowhere_are_refused(tmp_path):
    save(tmp_path / "run" / "model.tar", nn.Linear(2, 2))
    with pytest.raises(
        UsageError, match=r"No tensor in .* fits .*encoder.layers.0.weight is not th"
    ):
        init_from("run", tmp_path, make_model("mlp", spec_for((4,), 2), False))
    with pytest.raises(UsageError, match="--init_from nobody must be a checkpoint, a folder"):
        init_from("nobody", tmp_path, make_model("mlp", spec_for((4,), 2), False))


class TorchBeastsNet(nn.Module):
    """The modules of PolyBeast's net as TorchBeast names them: names and shapes are what counts."""

    def __init__(self, num_actions):
        super().__init__()

        def block(channels):
            conv = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
            return nn.Sequential(nn.ReLU(), conv[0], nn.ReLU(), conv[1])

        widths = [4, 16, 32, 32]
        self.feat_convs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.MaxPool2d(3, 2, 1))
            for a, b in itertools.pairwise(widths)
        )
        self.resnet1 = nn.ModuleList(block(width) for width in widths[1:])
        self.resnet2 = nn.ModuleList(block(width) for width in widths[1:])
        self.fc = nn.Linear(3872, 256)
        self.core = nn.LSTM(257, 256)
        self.policy = nn.Linear(256, num_actions)
        self.baseline = nn.Linear(256, 1)


def test_the_deep_net_of_torchbeast_fits_ours(tmp_path):
    theirs, ours = TorchBeastsNet(6), Net(6, use_lstm=True).agent
    save(tmp_path / "model.tar", theirs)
    said = init_from(str(tmp_path), tmp_path, ours)
    num = len(ours.state_dict())
    assert said.startswith(f"{num} of {num} tensors")
    convs = ours.encoder.convs
    assert torch.equal(convs[4].weight, theirs.feat_convs[1][0].weight)
    assert torch.equal(convs[10].conv2.weight, theirs.resnet1[2][3].weight)
    assert torch.equal(convs[3].conv1.bias, theirs.resnet2[0][1].bias)
    assert torch.equal(ours.lstm.weight_ih_l0, theirs.core.weight_ih_l0)


@pytest.mark.parametrize("theirs_normalized", [True, False])
def test_runs_with_and_without_normalised_observations_share_weights(tmp_path, theirs_normalized):
    spec = spec_for((4,), 2)
    theirs = make_model("mlp", spec, False, normalize_observations=theirs_normalized)
    ours = make_model("mlp", spec, False, normalize_observations=not theirs_normalized)
    save(tmp_path / "run" / "model.tar", theirs)
    said = init_from("run", tmp_path, ours)
    theirs, ours = (getattr(model, "agent", model) for model in (theirs, ours))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    word = "Not used: moments.0.count" if theirs_normalized else "moments.0.mean is not there"
    assert word in said


def test_running_statistics_are_taken_whole_or_not_at_all(tmp_path):
    theirs, ours, same = (
        make_model("mlp", spec_for((size,), 2), False, normalize_observations=True)
        for size in (4, 5, 4)
    )
    theirs.observe_frames(7 + torch.randn(11, 3, 4), torch.ones(10, 3, dtype=torch.bool))
    save(tmp_path / "run" / "model.tar", theirs)
    said = init_from("run", tmp_path, ours)
    assert "moments.0.count goes with statistics that do not fit" in said
    assert ours.moments[0].count == 0
    init_from("run", tmp_path, same)
    assert same.moments[0].count == 30
    assert torch.equal(same.moments[0].mean, theirs.moments[0].mean)
