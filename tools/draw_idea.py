"""Draw docs/images/idea.svg: the same scores, made into weights by softmax and by relu/L.

    python tools/draw_idea.py

The picture is plain SVG: it has no chance in it, so a test compares it with what this draws.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from nomax import _figures

TARGET = Path(__file__).parent.parent / "docs" / "images" / "idea.svg"

SCORES = (1.2, -0.8, 0.3, 2.1, -1.5, 0.7, -0.2, -1.1)
WIDTH, HEIGHT = 960, 600
MARGIN, STEP, BAR = 30, 46, 28  # left of the bars, from one to the next, of one
SCORE_ZERO, SCORE_UNIT = 178, 34  # where scores are zero, and pixels of one
STRIP_TOP, STRIP_BOTTOM = 252, 350  # what happens between scores and weights
WEIGHT_ZERO, WEIGHT_UNIT = 490, 230
PAPER, INK, FAINT, RULE = (colour.light for colour in (_figures.PAPER, _figures.INK, _figures.SOFT, _figures.RULE))
SOFTMAX, RELU = (_figures.colour_of(name).light for name in ("softmax", "relu"))
TELLING = {
    "softmax": ("eˢ / Σ eˢ: no weight is known before the whole row is,", "and none is ever zero."),
    "relu/L": ("max(s, 0) / L: each weight comes from its own score;", "parts of a row just add, and many are zero."),
}
ALTERNATIVE = (
    "Two columns start from the same eight scores of one query. On the left, softmax: every score goes into one sum, "
    "and every weight is divided by it. On the right, relu/L: every score becomes its weight alone; negative scores "
    "become weights of exactly zero."
)


def softmax(scores: Sequence[float]) -> list[float]:
    """Every weight needs the sum over all scores."""
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def relu_over_length(scores: Sequence[float]) -> list[float]:
    """Every weight needs its own score."""
    return [max(score, 0.0) / len(scores) for score in scores]


def picture() -> str:
    """The whole picture as SVG."""
    shapes = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{PAPER}"/>',
        *_column(20, "softmax", SOFTMAX, softmax(SCORES), _through_a_sum()),
        f'<line x1="{WIDTH / 2}" y1="30" x2="{WIDTH / 2}" y2="{HEIGHT - 30}" stroke="{RULE}"/>',
        *_column(WIDTH // 2 + 20, "relu/L", RELU, relu_over_length(SCORES), _one_by_one()),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" font-family="system-ui, sans-serif" font-size="16">'
    )
    return _figures.for_both("\n".join([head, f"<title>{ALTERNATIVE}</title>", *shapes, "</svg>"]) + "\n")


def _column(left: int, name: str, colour: str, weights: Sequence[float], strip: Iterator[str]) -> Iterator[str]:
    yield f'<g transform="translate({left} 0)">'
    yield _text(0, 44, name, size=24, weight="bold", colour=colour)
    yield _text(0, 76, "the scores q·k/√d of one query, a bar for each key", colour=FAINT)
    yield from _bars(SCORES, SCORE_ZERO, SCORE_UNIT, FAINT)
    yield from strip
    yield _text(0, 372, "its weights", colour=FAINT)
    yield from _bars(weights, WEIGHT_ZERO, WEIGHT_UNIT, colour)
    yield from _mean(len(weights))
    for number, line in enumerate(TELLING[name]):
        yield _text(0, 536 + 24 * number, line)
    yield "</g>"


def _bars(values: Sequence[float], zero: int, unit: int, colour: str) -> Iterator[str]:
    yield _line(MARGIN, zero, _middle(len(values) - 1) + BAR, zero, INK, axis=True)
    for number, value in enumerate(values):
        height = abs(value) * unit
        top = zero - height if value > 0 else zero
        if value:
            yield _rect(_middle(number) - BAR / 2, top, BAR, height, colour)
        else:
            yield _circle(_middle(number), zero, 5, colour)


def _mean(length: int) -> Iterator[str]:
    """Where weights lie that are all alike: the mean of softmax's."""
    y = WEIGHT_ZERO - WEIGHT_UNIT / length
    right = _middle(length - 1) + BAR
    yield f'<line x1="{MARGIN}" y1="{y:g}" x2="{right:g}" y2="{y:g}" stroke="{FAINT}" stroke-dasharray="4 4"/>'
    yield _text(right + 4, y + 5, "1/L", colour=FAINT)


def _through_a_sum() -> Iterator[str]:
    """Lines from all scores into one sum, and from it to all weights."""
    x, y = (_middle(0) + _middle(len(SCORES) - 1)) / 2, (STRIP_TOP + STRIP_BOTTOM) / 2
    for number in range(len(SCORES)):
        yield _line(_middle(number), STRIP_TOP, x, y, SOFTMAX)
        yield _line(x, y, _middle(number), STRIP_BOTTOM, SOFTMAX)
    yield _circle(x, y, 21, SOFTMAX)
    yield _text(x, y + 7, "Σ", size=22, colour=SOFTMAX, anchor="middle")


def _one_by_one() -> Iterator[str]:
    """A line from each score to its weight."""
    for number in range(len(SCORES)):
        yield _line(_middle(number), STRIP_TOP, _middle(number), STRIP_BOTTOM, RELU)


def _middle(number: int) -> float:
    return MARGIN + BAR / 2 + 8 + number * STEP


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:g}" y="{y:.1f}" width="{width:g}" height="{height:.1f}" rx="2" fill="{colour}"/>'


def _circle(x: float, y: float, radius: int, colour: str) -> str:
    look = f'fill="{PAPER}" stroke="{colour}" stroke-width="2"'
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius}" {look}/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, axis: bool = False) -> str:
    look = 'stroke-width="1"' if axis else 'stroke-width="1.5" stroke-opacity="0.75"'
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" {look}/>'


def _text(
    x: float, y: float, text: str, size: int = 16, weight: str = "normal", colour: str = INK, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


if __name__ == "__main__":
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(picture(), encoding="utf-8")
    print(TARGET)
