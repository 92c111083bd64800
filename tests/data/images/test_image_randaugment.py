"""RandAugment held against big_vision's formulas, pixel by pixel, and against digests of what TensorFlow made."""

import hashlib
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from pictures import pattern

from nomax.data.images import randaugment as module
from nomax.data.images.randaugment import OPERATIONS, operation, randaugment
from nomax.data.images.transforms import Augment, planes

Pixels = npt.NDArray[np.uint8]
SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
WIDTH, HEIGHT = 26, 22
CENTRE = (3, 20)
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tensorflow.json").read_text())
f32 = np.float32


def image(width: int = WIDTH, height: int = HEIGHT) -> Pixels:
    return planes(np.asarray(pattern(width, height))[None])[0]


def byte(value: float) -> int:
    """What a cast to a byte makes of a number: its fraction is cut off."""
    return int(min(max(value, 0.0), 255.0))


def blended(one: int, other: int, factor: float) -> int:
    if factor == 1.0:
        return other
    return byte(f32(one) + f32(factor) * (f32(other) - f32(one)))


def round_half_away(value: float) -> int:
    return math.floor(abs(value) + 0.5) * (1 if value >= 0 else -1)


def pointwise(name: str, level: int, count: int) -> list[int]:
    """What becomes of each value where only the value matters."""
    factor = (level / 10) * 1.8 + 0.1
    table = []
    for value in range(256):
        if name == "Invert":
            new = 255 - value
        elif name == "Posterize":  # a shift is a byte, and at most 7
            shift = min((8 - int((level / 10) * 4)) & 0xFF, 7)
            new = (value >> shift) << shift
        elif name == "Solarize":  # a threshold is a byte
            new = value if value < (int((level / 10) * 256) & 0xFF) else 255 - value
        elif name == "SolarizeAdd":
            new = min(value + int((level / 10) * 110), 255) if value < 128 else value
        elif name == "Brightness":
            new = blended(0, value, factor)
        else:
            new = blended(min(int(count / 256), 255), value, factor)
        table.append(new)
    return table


def by_plane(name: str, values: list[int]) -> list[int]:
    """AutoContrast and Equalize of one plane."""
    if name == "AutoContrast":
        low, high = min(values), max(values)
        scale = f32(255) / (f32(high) - f32(low))
        return [byte(f32(value) * scale + (-f32(low) * scale)) for value in values]
    histogram = Counter(values)
    step = (len(values) - histogram[max(values)]) // 255
    if step == 0:
        return values
    return [min((sum(histogram[v] for v in range(value)) + step // 2) // step, 255) if value else 0 for value in values]


def source_of(name: str, level: int, sign: int, x: int, y: int, width: int, height: int) -> tuple[float, float]:
    """The place from which the pixel at column x and row y is taken."""
    if name == "TranslateX":
        return x + sign * int((level / 10) * 100 * width / 224), y
    if name == "TranslateY":
        return x, y + sign * int((level / 10) * 100 * height / 224)
    if name == "ShearX":
        return float(f32(x) + f32(sign * (level / 10) * 0.3) * f32(y)), y
    if name == "ShearY":
        return x, float(f32(y) + f32(sign * (level / 10) * 0.3) * f32(x))
    angle = math.radians(sign * (level / 10) * 30)
    across, down = x - (width - 1) / 2, y - (height - 1) / 2
    return (
        math.cos(angle) * across - math.sin(angle) * down + (width - 1) / 2,
        math.sin(angle) * across + math.cos(angle) * down + (height - 1) / 2,
    )


def expected(name: str, level: int, sign: int, pixels: Pixels) -> npt.NDArray[np.int64]:
    """One operation on [3, H, W], in plain loops; -1 where exact arithmetic cannot tell which of two is nearer."""
    _, height, width = pixels.shape
    factor = (level / 10) * 1.8 + 0.1
    result = pixels.astype(np.int64)
    if name in ("Invert", "Posterize", "Solarize", "SolarizeAdd", "Brightness", "Contrast"):
        table = pointwise(name, level, height * width)
        return np.array([[[table[value] for value in row] for row in plane] for plane in pixels.tolist()])
    if name in ("AutoContrast", "Equalize"):
        return np.array([by_plane(name, plane.ravel().tolist()) for plane in pixels]).reshape(pixels.shape)
    for y in range(height):
        for x in range(width):
            here = [int(value) for value in pixels[:, y, x]]
            if name == "Cutout":
                reach = int((level / 10) * 40 * min(height, width) / 224)
                if CENTRE[0] - reach <= y < CENTRE[0] + reach and CENTRE[1] - reach <= x < CENTRE[1] + reach:
                    result[:, y, x] = 128
            elif name == "Color":
                red, green, blue = (f32(value) * f32(1 / 255) for value in here)
                luma = (red * f32(0.2989) + green * f32(0.587)) + blue * f32(0.114)
                result[:, y, x] = [blended(int(luma * f32(255.5)), value, factor) for value in here]
            elif name == "Sharpness":
                if 0 < y < height - 1 and 0 < x < width - 1:
                    for band in range(3):
                        total = f32(0)
                        for down in (-1, 0, 1):
                            for across in (-1, 0, 1):
                                weight = f32(5 if down == across == 0 else 1) / f32(13)
                                total = total + f32(pixels[band, y + down, x + across]) * weight
                        result[band, y, x] = blended(byte(total), here[band], factor)
            else:
                places = source_of(name, level, sign, x, y, width, height)
                # Where float32 may round a place (below 128: by up to 2⁻¹⁸) across a half, either neighbour is right.
                if any(abs(abs(place) % 1 - 0.5) < 1e-5 for place in places) and name == "Rotate":
                    result[:, y, x] = -1
                    continue
                from_x, from_y = (round_half_away(place) for place in places)
                inside = 0 <= from_x < width and 0 <= from_y < height
                result[:, y, x] = pixels[:, from_y, from_x] if inside else 128
    return result


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_big_visions_at_every_level(name: str) -> None:
    pixels = image()
    for level in range(31):
        for sign in (1, -1) if name in SIGNED else (1,):
            result, wanted = operation(pixels, name, level, sign, CENTRE), expected(name, level, sign, pixels)
            sure = wanted >= 0
            assert sure.mean() > 0.9
            assert np.array_equal(result[sure], wanted[sure]), (level, sign)


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_plane_stands_for_three(name: str) -> None:
    plane = image()[:1]
    for level in (0, 10, 15):
        grey = operation(plane, name, level, 1, CENTRE)
        assert grey.shape == plane.shape
        assert np.array_equal(np.repeat(grey, 3, 0), operation(np.repeat(plane, 3, 0), name, level, 1, CENTRE))


@pytest.mark.parametrize("key", GOLDEN["operations"])
def test_every_operation_gives_what_tensorflow_gave(key: str) -> None:
    """At 224 × 224, as tools/record_tensorflow.py wrote it down."""
    name, level, sign = key.split()
    result = operation(image(224, 224), name, int(level), int(sign), tuple(GOLDEN["centre"]))
    digest = hashlib.sha256(np.ascontiguousarray(result.transpose(1, 2, 0)).tobytes()).hexdigest()
    assert digest[:16] == GOLDEN["operations"][key]


def test_contrast_pulls_towards_the_number_of_pixels_and_solarize_wraps() -> None:
    """The two that looked like Pillow's and are not: at 224 × 224 grey is 196, and levels 10 and 20 invert."""
    pixels = image(224, 224)
    low = operation(pixels, "Contrast", 0, 1, (0, 0))
    assert 0 <= 0.9 * 196 + 0.1 * pixels.mean() - low.mean() < 1  # fractions are cut off
    for level in (10, 20, 30):
        assert np.array_equal(operation(pixels, "Solarize", level, 1, (0, 0)), 255 - pixels)
    from_128 = np.where(pixels < 128, pixels, 255 - pixels)
    assert np.array_equal(operation(pixels, "Solarize", 15, 1, (0, 0)), from_128)


@pytest.mark.parametrize("value", [0, 77, 255])
def test_images_of_one_colour_and_tiny_ones_pass(value: int) -> None:
    for shape in ((3, 8, 8), (1, 1, 1), (3, 2, 5)):
        plain = np.full(shape, value, np.uint8)
        for name in OPERATIONS:
            assert operation(plain, name, 15, 1, (0, 0)).shape == shape
        assert np.array_equal(operation(plain, "AutoContrast", 15, 1, (0, 0)), plain)
        assert np.array_equal(operation(plain, "Equalize", 15, 1, (0, 0)), plain)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="operation is 'Blur'; it must be one of AutoContrast, "):
        operation(image(), "Blur", 1, 1, (0, 0))


def test_operations_signs_and_centres_are_drawn_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[str, int, tuple[int, int]]] = []

    def note(pixels: Pixels, name: str, level: int, sign: int, centre: tuple[int, int]) -> Pixels:
        drawn.append((name, sign, centre))
        return pixels

    monkeypatch.setattr(module, "operation", note)
    randaugment(np.zeros((4000, 1, 4, 5), np.uint8), 2, 10, 3, np.arange(4000))
    assert len(drawn) == 8000
    for values, kinds in (
        ([name for name, _, _ in drawn], 16),
        ([sign for _, sign, _ in drawn], 2),
        ([centre for _, _, centre in drawn], 20),
        ([(one[0], other[0]) for one, other in zip(drawn[::2], drawn[1::2], strict=True)], 256),
    ):
        counts = np.array(list(Counter(values).values()))
        mean = len(values) / kinds
        assert len(counts) == kinds
        assert ((counts - mean) ** 2 / mean).sum() < kinds - 1 + 5 * math.sqrt(2 * kinds)  # chi-squared


def test_operations_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(pixels: Pixels, *_: object) -> Pixels:
        return pixels // 2 + 1

    monkeypatch.setattr(module, "operation", half)
    result = randaugment(np.full((2, 3, 4, 4), 100, np.uint8), 3, 10, 0, np.arange(2))
    assert (result == 14).all()  # 51, 26, 14
    assert np.array_equal(randaugment(result, 0, 10, 0, np.arange(2)), result)


def test_the_images_given_are_not_changed() -> None:
    pixels = np.stack([image()] * 40)
    before = pixels.copy()
    changed = randaugment(pixels, 2, 9, 1, np.arange(40))
    assert np.array_equal(pixels, before)
    assert (changed != before).any((1, 2, 3)).mean() > 0.8
    augment = Augment(22, "none", flip=False, randaug=(2, 9))
    square = pixels[..., :22].copy()
    assert np.array_equal(augment.finish(square, 1, np.arange(40)), randaugment(square, 2, 9, 1, np.arange(40)))
