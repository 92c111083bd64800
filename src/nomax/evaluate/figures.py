"""What the figures of this folder share: the look, and words for those who cannot see them."""

import io
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

FORMATS = (".svg", ".png")
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")  # Okabe and Ito's, told apart by all eyes
MARKERS = "os^Dv*"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.parse_math": False,  # a $ in the name of a run is a $
    "svg.fonttype": "none",  # text stays text: searchable, and read aloud
    "svg.hashsalt": "nomax",  # the same results give the same file
}


def require() -> Any:
    """Import matplotlib, or say how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a figure needs matplotlib: pip install 'nomax[plot]'") from error
    return matplotlib


def check_format(path: Path) -> Path:
    """The path, if its ending names a format that we write."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--output {path}: a picture ends in {' or '.join(FORMATS)}.")
    return path


def rendered(figure: Any, kind: str, title: str, description: str) -> bytes:
    """A figure as the bytes of an .svg or .png file, with its title and description inside."""
    buffer = io.BytesIO()
    if kind == ".png":
        figure.savefig(buffer, format="png", dpi=144, metadata={"Title": title, "Description": description})
        return buffer.getvalue()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue().decode()
    text = text.replace("<svg", f'<svg role="img" aria-label={quoteattr(title)}', 1)
    return text.replace("</title>", f"</title>\n <desc>{escape(description)}</desc>", 1).encode()
