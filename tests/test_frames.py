"""What models make of observations: which net, and numbers of which size."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete, spec_of_space
from tests.helpers.specs import spec_for
from torchbeast.errors import UsageError
from torchbeast.models import make_model
from torchbeast.models.factory import choose_encoder
from torchbeast.models.frames import Images, Numbers, find_layout
from torchbeast.run import recipes

# ------------------------------------------------------------------------------------ which net


@pytest.mark.parametrize(
    ("shape", "image"),
    [
        ((84, 84), (1, 84, 84)),
        ((84, 84, 1), (1, 84, 84)),
        ((84, 84, 3), (3, 84, 84)),
        ((3, 84, 84), (3, 84, 84)),
        ((4, 84, 84), (4, 84, 84)),
        ((4, 84, 84, 3), (12, 84, 84)),
        ((4, 84, 84, 1), (4, 84, 84)),
        ((4, 3, 84, 84), (12, 84, 84)),
        ((64, 64, 3), (3, 64, 64)),
        ((210, 160, 3), (3, 210, 160)),
        ((32, 32), (1, 32, 32)),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_of_any_usual_layout_get_an_image_net_and_its_settings(shape, image, dtype):
    spec = spec_for(shape, 2, dtype, 0, 255 if dtype == "uint8" else 1)
    assert choose_encoder("auto", spec) == "shallow"
    assert find_layout(shape).shape == image
    assert recipes._for_frames(spec, "auto") == recipes.IMAGE | recipes.FAST_CONVOLUTIONS


def test_an_image_net_takes_stacks_of_colour_images():
    shape = (4, 40, 40, 3)
    model = make_model("auto", spec_for(shape, 2), use_lstm=False)
    numbers = {name: torch.zeros(2, 3) for name in ("reward", "last_action", "done")}
    output, _ = model({"frame": torch.zeros(2, 3, *shape, dtype=torch.uint8), **numbers})
    assert output["policy_logits"].shape == (2, 3, 2)


@pytest.mark.parametrize(
    "shape", [(), (4,), (10, 5), (8, 8, 17), (1000, 6), (7, 7, 3), (4, 10, 10)]
)
def test_vectors_and_small_boards_get_the_mlp_and_its_settings(shape):
    spec = spec_for(shape, 2, "float32")
    assert choose_encoder("auto", spec) == "mlp"
    assert recipes._for_frames(spec, "auto") == recipes.VECTOR


@pytest.mark.parametrize("shape", [(84, 3, 84), (64, 64, 64), (84, 84, 3, 4), (2, 4, 84, 84, 3)])
def test_what_cannot_be_guessed_is_refused_with_the_shape_and_the_remedy(shape):
    spec = spec_for(shape, 2, "uint8")
    with pytest.raises(UsageError) as caught:
        make_model("auto", spec, use_lstm=False)
    assert str(list(shape)) in str(caught.value)
    assert "--model mlp" in str(caught.value)
    with pytest.raises(UsageError, match="cannot be guessed"):
        recipes._for_frames(spec, "auto")
    assert recipes._for_frames(spec, "mlp") == recipes.VECTOR


def test_settings_follow_the_model_that_is_given():
    image, vector = spec_for((84, 84), 2), spec_for((84,), 2)
    assert recipes._for_frames(image, "mlp") == recipes.VECTOR
    others = recipes.IMAGE | recipes.OTHERS_NETS
    assert recipes._for_frames(image, "my.module:Model") == others
    assert recipes._for_frames(vector, "my.module:Model") == recipes.VECTOR
    assert recipes._for_frames(spec_for((64, 64, 64), 2), "my.module:Model") == recipes.VECTOR


def test_images_too_small_for_an_image_net_get_one_sentence():
    with pytest.raises(UsageError, match="larger images than 10 x 5 with 1 channels"):
        make_model("shallow", spec_for((10, 5), 2), use_lstm=False)


def test_layouts_keep_every_pixel_at_its_place():
    frame = torch.arange(2 * 40 * 50 * 3, dtype=torch.float32).view(1, 2, 40, 50, 3)
    image = Images(ArraySpec("float32", (2, 40, 50, 3)))(frame)[0]
    for stacked in range(2):
        for channel in range(3):
            assert image[3 * stacked + channel].equal(frame[0, stacked, :, :, channel])
    assert find_layout((2, 40, 50, 3)).shape == (6, 40, 50)


# ---------------------------------------------------------------------------------- which numbers


def test_a_board_of_zeros_and_ones_stays_as_it_is_whatever_its_dtype():
    board = torch.tensor([[0, 1, 1, 0]], dtype=torch.uint8)
    assert Numbers(ArraySpec("uint8", (4,), 0, 1))(board).tolist() == [[0, 1, 1, 0]]


def test_bytes_of_unknown_bounds_are_taken_for_0_to_255():
    frame = torch.tensor([[0, 255]], dtype=torch.uint8)
    for spec in (ArraySpec("uint8", (2,)), ArraySpec("uint8", (2,), 0, 255)):
        torch.testing.assert_close(Numbers(spec)(frame), torch.tensor([[0.0, 1.0]]))


@pytest.mark.parametrize(
    ("space", "values", "expected"),
    [
        (spaces.Box(0, 1000, (1,), np.int32), [250], [0.25]),
        (spaces.Box(-100, 50, (2,), np.float32), [-100, 50], [-1, 0.5]),
        (spaces.Box(-0.07, 0.07, (1,), np.float32), [-0.07], [-1]),
        (spaces.Box(-12.5, 12.5, (1,), np.float32), [2.5], [2.5]),  # a limit, hardly ever reached
        (spaces.Box(-10, 5, (2,), np.int8), [-10, 5], [-1, 0.5]),
        (spaces.Box(100, 102, (1,), np.float32), [101], [0.5]),
        (spaces.Box(-np.inf, np.inf, (1,), np.float32), [37], [37]),
        (spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32), [37], [37]),
        (spaces.Box(0, np.inf, (1,), np.float32), [37], [37]),
        (spaces.Box(0, 40, (), np.float32), 10, [0.25]),
        (spaces.MultiBinary(3), [0, 1, 1], [0, 1, 1]),
        (spaces.Discrete(3, start=5), 6, [0, 1, 0]),
        (spaces.MultiDiscrete([2, 3]), [1, 2], [0, 1, 0, 0, 1]),
        (
            spaces.Box(np.float32([-0.4, -3.4e38]), np.float32([0.4, 3.4e38])),
            [0.2, 7.0],
            [0.5, 7.0],
        ),
    ],
    ids=str,
)
def test_numbers_are_scaled_by_the_bounds_of_their_space(space, values, expected):
    frame = torch.from_numpy(np.asarray([values], space.dtype))
    numbers = Numbers(spec_of_space(space))
    assert numbers.num_outputs == len(expected)
    torch.testing.assert_close(numbers(frame), torch.tensor([expected], dtype=torch.float32))


def test_categories_from_elsewhere_may_be_out_of_range():
    numbers = Numbers(discrete(3))
    assert numbers(torch.tensor([-4, 99])).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_float_images_look_to_the_net_as_bytes_do():
    as_bytes = torch.randint(256, (2, 40, 40), dtype=torch.uint8)
    images = [
        Images(ArraySpec("uint8", (40, 40), 0, 255))(as_bytes),
        Images(ArraySpec("uint8", (40, 40)))(as_bytes),
        Images(ArraySpec("float32", (40, 40), 0.0, 1.0))(as_bytes / 255),
        Images(ArraySpec("float32", (40, 40), 0.0, 255.0))(as_bytes.float()),
    ]
    for image in images[1:]:
        torch.testing.assert_close(image, images[0])
    assert images[0].mean(dim=(1, 2, 3)).abs().max() < 1e-5


def test_scales_are_in_no_checkpoint():
    spec = Spec(ArraySpec("float32", (2,), (-1.0, 0.0), (1.0, 5.0)), discrete(2))
    plain = Spec(ArraySpec("float32", (2,)), discrete(2))
    states = [make_model("mlp", s, use_lstm=False).state_dict() for s in (spec, plain)]
    assert states[0].keys() == states[1].keys()
