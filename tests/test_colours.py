"""The colours of figures and pages: in one place, one for each φ, told apart by all eyes on white and in the dark."""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from nomax import _figures
from nomax._figures import PAPER, PHI
from nomax.phi import ACTIVATIONS, ROW_MAPS

ROOT = Path(__file__).parent.parent
TOGETHER = list(PHI)[:8]  # softmax and the seven h that one figure shows
SCHEMES = ("light", "dark")
# How the linear RGB of a colour is seen, after Machado, Oliveira and Fernandes 2009, at full severity.
SIGHT = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Where equal distances look about equally far apart (Ottosson 2020); black and white are 1 apart."""
    cones = np.array(
        [
            [0.4122214708, 0.5363325363, 0.0514459929],
            [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005],
        ]
    )
    lab = np.array(
        [
            [0.2104542553, 0.7936177850, -0.0040720468],
            [1.9779984951, -2.4285922050, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.8086757660],
        ]
    )
    return lab @ np.cbrt(cones @ rgb)


def apart(one: str, other: str) -> float:
    """The distance of two colours to those who tell them apart the least."""
    seen = ([oklab(np.clip(np.array(sight) @ linear(c), 0, 1)) for c in (one, other)] for sight in SIGHT.values())
    return min(float(np.linalg.norm(first - second)) for first, second in seen)


def contrast(one: str, other: str) -> float:
    """WCAG's: 1 to 21."""
    low, high = sorted(float(np.dot([0.2126, 0.7152, 0.0722], linear(colour))) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_the_measures_agree_with_what_is_known() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # WCAG's own example
    assert apart("#ffffff", "#000000") == pytest.approx(1, abs=0.01)
    assert apart("#ff0000", "#008000") < 0.5 * np.linalg.norm(oklab(linear("#ff0000")) - oklab(linear("#008000")))


def test_every_activation_has_a_colour_of_its_own() -> None:
    assert set(PHI) == {*ACTIVATIONS, *ROW_MAPS}
    for scheme in SCHEMES:
        assert len({getattr(colour, scheme) for colour in PHI.values()}) == len(PHI)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_are_told_apart_by_all_eyes(scheme: str) -> None:
    seen = {name: getattr(colour, scheme) for name, colour in PHI.items()}
    assert apart(seen["softmax"], seen["relu"]) > 0.2
    # Okabe and Ito's seven with black have 0.055.
    assert min(apart(seen[one], seen[other]) for one, other in combinations(TOGETHER, 2)) > 0.065
    assert min(apart(seen[one], seen[other]) for one, other in combinations(PHI, 2)) > 0.04


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lines_and_letters_stand_out_from_their_background(scheme: str) -> None:
    paper = getattr(PAPER, scheme)
    assert min(contrast(getattr(colour, scheme), paper) for colour in PHI.values()) > 3  # WCAG 1.4.11
    words = (_figures.INK, _figures.SOFT, _figures.GOOD, _figures.BAD, _figures.OPEN)
    assert min(contrast(getattr(colour, scheme), paper) for colour in words) > 4.5  # WCAG 1.4.3


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("relu/L, pico/4, seed 0", "relu"),
        ("relu2, gate", "relu2"),
        ("1.4142135623730951*relu/L^0.5", "relu"),
        ("softmax + LN", "softmax"),
        ("my-run (softmax)", "softmax"),
        ("ReLUFormer", "relu"),
        ("1.5-entmax", "entmax15"),
        ("sigmoid(x-log L)", "sigmoid"),
    ],
)
def test_a_label_has_the_colour_of_the_phi_that_it_names(words: str, name: str) -> None:
    assert _figures.colour_of(words) == PHI[name]
    assert _figures.colour_of("the factor alone", "relu") == PHI["relu"]
    assert _figures.colour_of("prelude") == _figures.SOFT


def test_a_drawing_keeps_its_light_colours_and_names_the_dark_ones() -> None:
    relu, ink = PHI["relu"], _figures.INK
    shapes = f'<path style="fill: none; stroke: {relu.light}"/><text fill="{ink.light}">a</text>'
    drawing = f'<svg width="9"><title>It</title>{shapes}</svg>'
    drawn = _figures.for_both(drawing)
    start, style, rest = re.fullmatch(r"(<svg[^>]*><title>It</title>)\s*<style>(.*)</style>(.*)", drawn).groups()
    assert start + rest == drawing
    assert style.startswith("@media (prefers-color-scheme: dark){")
    assert f'[style*="stroke: {relu.light}"],[stroke="{relu.light}"]{{stroke:{relu.dark}!important}}' in style
    assert f'[fill="{ink.light}"]{{fill:{ink.dark}!important}}' in style
    assert "currentColor" not in style


def test_colours_are_written_in_one_place() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    names = [path.name for path in files if re.search(r"#[0-9a-fA-F]{6}\b", path.read_text(encoding="utf-8"))]
    assert names == ["_figures.py"]


def committed() -> list[Path]:
    folders = ("results", "benchmarks/results", "docs/images")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.svg"))


@pytest.mark.parametrize("path", committed(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_figures_of_this_repository_have_these_colours_and_turn_dark(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    style, _, drawing = text.partition("</style>")
    used = set(re.findall(r"(?:fill|stroke)(?:: |=\")(#[0-9a-fA-F]{3,8})", drawing))
    assert used
    assert used <= {colour.light for colour in _figures.ALL}
    for colour in _figures.ALL:
        assert (colour.light in used) == (f"{colour.dark}!important" in style)
