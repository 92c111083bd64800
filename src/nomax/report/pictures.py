"""The pictures of the page: figures and maps from results folders, and charts of curves that are drawn here.

They become data: URIs of <img>, not part of the document: the SVGs of matplotlib share ids, which must be unique in a
document, and a script in an image never runs.
"""

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from nomax import _figures

ADVICE = "Restore it, or run the study again."
LARGE_SVG = 400_000  # bytes; from here on a PNG beside it, if that is smaller, is shown instead
PIXELS = {"pt": 4 / 3, "px": 1.0, "": 1.0, "in": 96.0, "cm": 96 / 2.54, "mm": 96 / 25.4}
PLAIN = " !$'()*+,-./:;=?@[]_~"  # what neither a URI nor a quoted attribute of HTML needs escaped
STROKES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
WIDTH = 9.0  # inches
ACROSS = 3  # panels side by side, at most
MOST = 40  # points of a line: of more of them, means over equal parts are drawn

Point = tuple[float, float]


@dataclass(frozen=True)
class Picture:
    """An image as the page shows it."""

    uri: str
    """Without any character that could end an attribute, so that the page need not escape it."""
    width: int
    height: int
    photograph: bool
    """Made of pixels: its colours are the message, and stay as they are in the dark."""
    description: str
    """The description inside the file."""


@dataclass(frozen=True)
class Panel:
    """A chart of lines, each a label and its points, over a number that counts, such as steps or layers."""

    title: str
    x_title: str
    lines: list[tuple[str, list[Point]]]
    percent: bool = False
    from_zero: bool = False
    roof: bool = False
    """Cut what goes through the roof, such as the loss of a run that diverges, so that it does not flatten others."""

    @property
    def finite(self) -> list[tuple[str, list[Point]]]:
        """The lines without points that are not finite."""
        return [(label, [point for point in points if all(map(math.isfinite, point))]) for label, points in self.lines]

    @property
    def top(self) -> float:
        """The highest value to show: half as much again as the peak of a usual line, where there is a roof."""
        peaks = [max(y for _, y in points) for _, points in self.finite if points]
        usual = median(peaks)
        return min(max(peaks), 1.5 * usual) if self.roof and usual > 0 else max(peaks)

    def say(self, value: float) -> str:
        """Format a value as its axis counts it."""
        text = f"{100 * value:.3g} %" if self.percent else f"{value:.3g}"
        return text.replace("-", "−")

    @property
    def description(self) -> str:
        """The panel in words."""
        parts = [f"{label}: {self._words(points)}" for label, points in self.finite]
        return f"{self.title} by {self.x_title}. {' '.join(parts)}"

    def _words(self, points: Sequence[Point]) -> str:
        if not points:
            return "nothing to show."
        heights = [y for _, y in points]
        if len(points) <= 8:
            return f"{', '.join(map(self.say, heights))}."
        start, end, low, high = map(self.say, (heights[0], heights[-1], min(heights), max(heights)))
        return f"from {start} at {points[0][0]:,g} to {end} at {points[-1][0]:,g}, lowest {low}, highest {high}."


def chart(title: str, panels: Sequence[Panel], phis: Sequence[str]) -> Picture | None:
    """Draw panels that share their lines, and so their legend; None if no point is finite.

    phis: the activation whose colour each line has. Several lines of one colour are broken in different ways.
    """
    shown = [panel for panel in panels if any(points for _, points in panel.finite)]
    if not shown:
        return None
    with _figures.require().rc_context({**_figures.STYLE, "axes.titlesize": 10.5}):
        content = _figures.rendered(_paint(shown, phis), ".svg", title, "")
    # A tenth of a point is enough for curves, and their places are most of the file.
    small = re.sub(rb' d="[^"]*"', lambda match: re.sub(rb"(\.\d)\d+", rb"\1", match[0]), content)
    return replace(svg(small, title), description=" ".join(panel.description for panel in shown))


def _paint(panels: Sequence[Panel], phis: Sequence[str]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    looks: list[dict[str, Any]] = [
        {"color": _figures.PHI.get(phi, _figures.SOFT).light, "ls": STROKES[phis[:place].count(phi) % len(STROKES)]}
        for place, phi in enumerate(phis)
    ]
    columns = min(len(panels), ACROSS)
    lines, width = math.ceil(len(panels) / columns), WIDTH if len(panels) > 1 else WIDTH / 2
    longest = max(len(label) for label, _ in panels[0].lines)
    across = max(1, min(len(phis), int(12 * width / (longest + 6))))  # twelve letters take an inch
    height = 2.6 * lines + 0.2 * math.ceil(len(phis) / across) + 0.2
    sheet = Figure(figsize=(width, height), layout="constrained")
    axes = sheet.subplots(lines, columns, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        _paint_panel(axis, panel, looks)
    for axis in list(axes)[len(panels) :]:
        axis.set_axis_off()
    handles = [Line2D([], [], label=label, **look) for (label, _), look in zip(panels[0].lines, looks, strict=True)]
    sheet.legend(handles=handles, loc="outside lower left", ncols=across, frameon=False)
    return sheet


def _paint_panel(axis: Any, panel: Panel, looks: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for (_, points), look in zip(panel.finite, looks, strict=True):
        length = math.ceil(len(points) / MOST)
        parts = [points[start : start + length] for start in range(0, len(points), max(1, length))]
        x, y = [part[-1][0] for part in parts], [fmean(y for _, y in part) for part in parts]
        axis.plot(x, y, lw=1.5, marker="o" if len(parts) == 1 else "", ms=3.5, **look)
    low = 0.0 if panel.from_zero else min(y for _, points in panel.finite for _, y in points)
    room = 0.04 * (panel.top - low) or 0.5
    axis.set_ylim(0 if panel.from_zero else low - room, panel.top + room)
    axis.set_title(panel.title, loc="left")
    axis.set_xlabel(panel.x_title)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.grid(axis="y")
    if panel.percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))


def picture(folder: Path, name: str) -> Picture | None:
    """Return the picture in a folder, or None if it is not there; a ValueError says if it is damaged."""
    if Path(name).name != name or Path(name).suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"{folder / 'study.json'}: a figure must be a name.svg or name.png beside it: {name!r}.")
    path = folder / name
    if path.suffix.lower() == ".svg" and path.is_file() and path.stat().st_size > LARGE_SVG:
        pixels = path.with_suffix(".png")
        path = pixels if pixels.is_file() and pixels.stat().st_size < path.stat().st_size else path
    if not path.is_file():
        return None
    return svg(path.read_bytes(), str(path)) if path.suffix.lower() == ".svg" else _png(path)


def svg(content: bytes, name: str) -> Picture:
    """Return a drawing as a picture; a ValueError says if it is damaged."""
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise ValueError(f"{name} is damaged ({error}). {ADVICE}") from None
    if root.tag.rpartition("}")[2] != "svg":
        raise ValueError(f"{name} is no SVG image but <{root.tag}>.")
    view = [float(part) for part in re.findall(r"-?[\d.]+", root.get("viewBox", ""))]
    natural = view[2:] if len(view) == 4 else [800.0, 500.0]
    width, height = (_pixels(root.get(side), value) for side, value in zip(("width", "height"), natural, strict=True))
    words = next((part.text for part in root.iter() if part.tag.rpartition("}")[2] == "desc" and part.text), "")
    return Picture(f"data:image/svg+xml,{quote(_smaller(content), safe=PLAIN)}", width, height, False, words or "")


def _smaller(content: bytes) -> bytes:
    """Drop what nobody sees from a drawing, and use quotes that a URI need not escape: two thirds of base64's size."""
    seen = re.sub(rb"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|(?<=>)\s+(?=<)", b"", content, flags=re.DOTALL)
    plain = seen.replace(b"'DejaVu Sans', 'Verdana'", b"DejaVu Sans,Verdana")
    return seen if b"'" in plain else plain.replace(b'"', b"'")


def _pixels(length: str | None, otherwise: float) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", (length or "").strip())
    if not match or match[2] not in PIXELS:
        return round(otherwise)
    return round(float(match[1]) * PIXELS[match[2]])


def _png(path: Path) -> Picture:
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            width, height = image.size
            words = str(image.info.get("Description", ""))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is damaged ({error}). {ADVICE}") from None
    encoded = base64.b64encode(path.read_bytes()).decode()
    return Picture(f"data:image/png;base64,{encoded}", width, height, True, words)
