"""The style of all figures, and their descriptions for those who cannot see them."""

import io
import re
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from nomax import _colours
from nomax._colours import INK, PAPER, RULE, SOFT

FORMATS = (".svg", ".png")
MARKERS = "os^Dv*"
# The coordinates in an .svg, two thirds of the file: a hundredth of a point is enough.
_PLACES = re.compile(r'(?<= )(?:d|x|y|transform)="[^"]*"')
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # every label names them all
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a $ in the name of a run is a $
    "axes.edgecolor": SOFT.light,
    "axes.facecolor": PAPER.light,
    "axes.labelcolor": INK.light,
    "figure.facecolor": PAPER.light,
    "grid.color": RULE.light,
    "grid.linewidth": 0.7,
    "savefig.facecolor": PAPER.light,
    "text.color": INK.light,
    "xtick.color": SOFT.light,
    "xtick.labelcolor": INK.light,
    "ytick.color": SOFT.light,
    "ytick.labelcolor": INK.light,
    "svg.fonttype": "none",  # text stays text: searchable, and read aloud
    "svg.hashsalt": "nomax",  # the same results give the same file
}


def require() -> Any:
    """Import matplotlib, or say how to install it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install matplotlib") from error
    return matplotlib


def check_format(path: Path) -> Path:
    """Return the path, or raise if its suffix is not that of a format we write."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--output {path}: a picture ends in {' or '.join(FORMATS)}.")
    return path


def rendered(figure: Any, suffix: str, title: str, description: str) -> bytes:
    """Return a figure as the bytes of an .svg or .png file, with its title and description inside.

    An .svg turns dark with the page around it, in the colours of nomax._colours.
    """
    buffer = io.BytesIO()
    if suffix == ".png":
        figure.savefig(buffer, format="png", dpi=144, metadata={"Title": title, "Description": description})
        return buffer.getvalue()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue().decode()
    text = text.replace("<svg", f'<svg role="img" aria-label={quoteattr(title)}', 1)
    text = text.replace("</title>", f"</title>\n <desc>{escape(description)}</desc>", 1)
    return _colours.for_both(_PLACES.sub(_rounded, text)).encode()


def _rounded(places: re.Match[str]) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(places[0].split()))
