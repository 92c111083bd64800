"""What is done to images: the paper's crops, sizes and flips, held against TensorFlow, Pillow and closed forms."""

import hashlib
import itertools
import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import pattern, picture
from PIL import Image

from nomax.data.images import transforms
from nomax.data.images.transforms import Augment, Evaluation, inception_box, planes

Pixels = npt.NDArray[np.uint8]
POSITIONS = np.arange(1000)
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tensorflow.json").read_text())


def image_of(pixels: Pixels) -> Pixels:
    """[channels, H, W] as [H, W, channels]."""
    return pixels.transpose(1, 2, 0)


def stack(count: int, size: int) -> Pixels:
    """Pictures as [n, 3, size, size]."""
    return planes(np.stack([np.asarray(picture(number, size, size)) for number in range(count)]))


@settings(max_examples=200)
@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(0, 2**62), st.integers(0, 2**40))
def test_an_inception_crop_keeps_its_bounds(width: int, height: int, seed: int, position: int) -> None:
    box = inception_box(width, height, (0.05, 1.0), seed, position)
    left, top, right, bottom = box
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert box == inception_box(width, height, (0.05, 1.0), seed, position)
    if box != (0, 0, width, height):
        wide, tall = right - left, bottom - top
        assert 0.75 * tall - 1 <= wide <= 1.33 * tall + 1
        assert 0.05 * width * height - tall <= wide * tall <= width * height


def test_inception_crops_are_spread_as_tensorflow_spreads_them() -> None:
    """At an aspect a, the height is uniform from √(0.05·W·H/a) to the largest that fits."""
    width, height = 500, 375
    boxes = np.array([inception_box(width, height, (0.05, 1.0), 7, position) for position in range(4000)])
    wide, tall = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    aspect = wide / tall
    least, most = np.sqrt(0.05 * width * height / aspect), np.minimum(height, width / aspect)
    free = tall < 370  # the aspect of a crop is known well enough except by its rounding
    places = {
        "height": (tall - least) / (most - least),
        "aspect": (aspect[free] - 0.75) / (1.33 - 0.75),
        "left": boxes[:, 0] / (width - wide + 1),
        "top": (boxes[:, 1] / (height - tall + 1))[tall < 300],
    }
    for name, values in places.items():
        ordered = np.sort(values)
        distance = np.abs(ordered - np.linspace(0, 1, len(ordered))).max()
        # Kolmogorov and Smirnov's, of 4,000 uniform numbers, is larger with probability 2·exp(-2·4000·0.05²) = 4e-9.
        assert distance < 0.05, (name, distance)


def test_a_part_is_resized_as_pillow_does() -> None:
    image = picture(0, 301, 203)
    for box, size in (((0, 0, 301, 203), 64), ((17, 5, 120, 190), 96), ((40, 30, 52, 44), 64)):
        mine = image_of(Augment(size).resized(image, box)).astype(int)
        theirs = np.asarray(image.crop(box).resize((size, size), Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(mine - theirs).max() <= 1  # both round, each in its own precision


def bilinear(pixels: Pixels, size: int) -> npt.NDArray[np.float64]:
    """Between the four nearest pixel centres, in float64: TensorFlow's resize without antialiasing."""
    result = pixels.astype(np.float64)
    for axis in (0, 1):
        length = result.shape[axis]
        places = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
        low = np.floor(places).astype(int)
        share = (places - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        high = np.minimum(low + 1, length - 1)
        result = np.take(result, low, axis) * (1 - share) + np.take(result, high, axis) * share
    return result


def area(pixels: Pixels, across: int, down: int) -> npt.NDArray[np.float64]:
    """The mean over each pixel's box, fractions of pixels included, in float64: the definition."""

    def shares(old: int, new: int) -> npt.NDArray[np.float64]:
        table = np.zeros((new, old))
        for pixel in range(new):
            for place in range(old):
                covered = min((pixel + 1) * old / new, place + 1) - max(pixel * old / new, place)
                table[pixel, place] = max(covered, 0.0) * new / old
        return table

    height, width = pixels.shape[:2]
    tall = np.tensordot(shares(height, down), pixels.astype(np.float64), 1)
    return np.einsum("ajc,bj->abc", tall, shares(width, across), optimize=True)


def truncated(values: npt.NDArray[np.float64], pixels: Pixels, slack: float) -> bool:
    """Whether bytes are values without their fractions, but for what float32 makes of a place or a sum."""
    return bool((pixels <= values + slack).all() and (pixels > values - 1 - slack).all())


def test_without_antialiasing_training_cuts_off_tensorflows_bilinear() -> None:
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (150, 200, 3), dtype=np.uint8))
    box = (11, 7, 160, 143)
    wanted = bilinear(np.asarray(image.crop(box)), 48)
    trained = image_of(Augment(48, antialias=False).resized(image, box))
    square = Evaluation(48, "resize", antialias=False)
    evaluated = image_of(square.resized(image.crop(box), square.box(149, 136, 0, 0)))
    assert np.array_equal(trained, evaluated)
    assert truncated(wanted, trained, 1e-3)
    cut_off = (wanted - trained).mean()  # of fractions that are uniform in 0 … 1, to six standard errors
    assert abs(cut_off - 0.5) < 6 * np.sqrt(1 / 12 / wanted.size)
    averaged = image_of(Augment(48).resized(image, box))
    assert np.abs(averaged - wanted).max() > 20


SIZES = [(500, 375), (375, 500), (333, 500), (300, 300), (1000, 257), (512, 512), (60, 45), (224, 224)]


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_evaluation_averages_to_the_shorter_side_and_takes_the_centre(width: int, height: int, channels: int) -> None:
    image = pattern(width, height).convert("RGB" if channels == 3 else "L")
    evaluation = Evaluation(224, channels=channels)
    factor = 256 / min(width, height)
    across, down = round(width * factor), round(height * factor)
    left, top = (across - 224) // 2, (down - 224) // 2
    larger = area(np.asarray(image).reshape(height, width, channels), across, down)
    wanted = larger[top : top + 224, left : left + 224]
    pixels = image_of(evaluation.resized(image, evaluation.box(width, height, 0, 0)))
    assert pixels.shape == (224, 224, channels)
    # TensorFlow's edges are float32, so that a box may be off by 1e-4 of a pixel at the far side of a long image.
    assert truncated(wanted, pixels, 0.02)
    pillow = np.asarray(image.resize((across, down), Image.Resampling.BOX)).reshape(down, across, channels)
    if factor != 0.5:
        assert np.abs(pillow[top : top + 224, left : left + 224] - wanted).max() > 20  # this would show a box filter


@pytest.mark.parametrize("key", GOLDEN["resized"])
def test_images_are_resized_to_the_bits_of_tensorflow(key: str) -> None:
    """As tools/record_tensorflow.py wrote it down; "small" is what the paper evaluates with, "square" its probes."""
    crop, width, height = key.split()
    evaluation = Evaluation(224, crop, antialias=False)  # type: ignore[arg-type]
    image = pattern(int(width), int(height))
    pixels = image_of(evaluation.resized(image, evaluation.box(*image.size, 0, 0)))
    assert hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()[:16] == GOLDEN["resized"][key]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 255), st.sampled_from([8, 33, 64]))
def test_an_image_of_one_colour_keeps_it_to_a_level(width: int, height: int, value: int, size: int) -> None:
    """TensorFlow's weights do not quite sum to one, and then the fraction is cut off."""
    image = Image.new("L", (width, height), value)
    for evaluation in (Evaluation(size, channels=1), Evaluation(size, "square", 1, antialias=False)):
        pixels = evaluation.resized(image, evaluation.box(width, height, 0, 0)).astype(int)
        assert pixels.shape == (1, size, size)
        assert {*np.unique(pixels).tolist()} <= {value, value - 1 if evaluation.crop == "small" else value}


def test_probes_resize_to_a_square_and_take_the_centre() -> None:
    image = picture(1, 500, 375)
    probe = Evaluation(224, "square")
    expected = np.asarray(image.resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))).astype(int)
    pixels = image_of(probe.resized(image, probe.box(500, 375, 0, 0))).astype(int)
    assert np.abs(pixels - expected).max() <= 1  # both round, on grids that float32 places differently


def test_other_sizes_keep_the_proportion_of_256_to_224() -> None:
    assert Evaluation(112, "square").box(128, 128, 0, 0) == (8, 8, 120, 120)
    assert Evaluation(28).box(32, 32, 0, 0) == (2, 2, 30, 30)


def test_training_knows_the_evaluation_that_goes_with_it() -> None:
    assert Augment(224, channels=1, antialias=False).evaluation() == Evaluation(224, "small", 1, antialias=False)
    assert Augment(32, "pad").evaluation() == Evaluation(32, "none")
    assert Augment(64, "resize").evaluation() == Evaluation(64, "resize")


def test_half_of_the_images_are_mirrored() -> None:
    original = np.repeat(stack(1, 8), len(POSITIONS), 0)
    flipped = Augment(8, "none").finish(original.copy(), 3, POSITIONS)
    mirrored = (flipped == original[..., ::-1]).all((1, 2, 3))
    same = (flipped == original).all((1, 2, 3))
    assert (mirrored ^ same).all()
    assert 400 < mirrored.sum() < 600
    assert (Augment(8, "none", flip=False).finish(original.copy(), 3, POSITIONS) == original).all()


def test_padded_crops_are_those_of_the_image_mirrored_at_its_borders() -> None:
    size = 16
    original = stack(1, size)
    padded = np.pad(original[0], ((0, 0), (2, 2), (2, 2)), "reflect")
    allowed = {}
    for top, left, flip in itertools.product(range(5), range(5), (False, True)):
        part = padded[:, top : top + size, left : left + size]
        allowed[(part[:, :, ::-1] if flip else part).tobytes()] = (top, left, flip)
    assert len(allowed) == 50
    moved = Augment(size, "pad").finish(np.repeat(original, len(POSITIONS), 0), 0, POSITIONS)
    seen = [allowed[image.tobytes()] for image in moved]
    counts = np.bincount([top * 10 + left * 2 + flip for top, left, flip in seen], minlength=50)
    assert counts.min() > 0
    assert ((counts - 20) ** 2 / 20).sum() < 49 + 5 * math.sqrt(98)  # chi-squared


@pytest.mark.parametrize("augment", [Augment(16, "pad"), Augment(16, "none", randaug=(2, 10))])
def test_an_image_does_not_depend_on_the_batch_it_is_in(augment: Augment) -> None:
    pixels = stack(6, 16)
    positions = np.array([5, 900, 17, 3, 2**40, 8])
    together = augment.finish(pixels.copy(), 1, positions)
    for number in (4, 0, 2):
        alone = augment.finish(pixels[number : number + 1].copy(), 1, positions[number : number + 1])
        assert np.array_equal(alone[0], together[number])
    other = augment.finish(pixels.copy(), 2, positions)
    assert not np.array_equal(other, together)


def test_colours_become_grey_as_in_pillow_and_grey_stands_for_three() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9, 7, 3), dtype=np.uint8)
    grey = planes(pixels, 1)
    assert grey.shape == (5, 1, 9, 7)
    for mine, image in zip(grey[:, 0], pixels, strict=True):
        assert np.array_equal(mine, np.asarray(Image.fromarray(image).convert("L")))
    assert np.array_equal(planes(pixels, 3), pixels.transpose(0, 3, 1, 2))
    assert planes(pixels[..., 0], 3).shape == (5, 1, 9, 7)


def test_randaugment_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    Augment(16, "none", randaug=(2, 15)).finish(stack(4, 16), 0, np.arange(4))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"crop": "centre"}, "crop is 'centre'; it must be one of inception, resize, pad, none"),
        ({"channels": 2}, "channels is 2"),
        ({"area": (0.0, 1.0)}, "area is"),
        ({"area": (0.5, 0.2)}, "area is"),
        ({"randaug": (2, 31)}, "randaug is"),
        ({"randaug": (-1, 3)}, "randaug is"),
    ],
)
def test_impossible_settings_are_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augment(**{"size": 8, **wrong})  # type: ignore[arg-type]
    if wrong.keys() & {"size", "crop", "channels"}:
        with pytest.raises(ValueError, match=message.split(";")[0]):
            Evaluation(**{"size": 8, **wrong})  # type: ignore[arg-type]


def test_very_long_images_are_taken_whole() -> None:
    assert inception_box(1000, 10, (0.9, 1.0), 0, 0) == (0, 0, 1000, 10)
    assert transforms.ATTEMPTS < 20  # so that this does not take long
