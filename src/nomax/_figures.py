"""The looks of all figures and pages: colours, matplotlib's style, and descriptions for those who cannot see them.

Each φ has one colour, distinct to colour-blind readers, on light and on dark pages.
"""

import io
import re
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr


class Colour(NamedTuple):
    """A colour for light pages and its counterpart for dark ones."""

    light: str
    dark: str


PAPER = Colour("#ffffff", "#16181c")
INK = Colour("#1d1f23", "#e6e4df")
SOFT = Colour("#5d6169", "#a2a5ac")
RULE = Colour("#dcdad5", "#3a3d43")
GOOD = Colour("#17704d", "#7fd6ae")
BAD = Colour("#a8381a", "#f5a58b")
OPEN = Colour("#75590c", "#e4c66e")

# The name of a φ's activation decides. Chosen by a search that keeps all of them apart for normal, protanopic,
# deuteranopic and tritanopic sight, most of all softmax from relu, and then the eight that one figure shows together.
PHI = {
    "softmax": Colour("#d17115", "#f79700"),
    "relu": Colour("#0e6ee6", "#6087fd"),
    "relu2": Colour("#560171", "#a85db7"),
    "gelu": Colour("#297964", "#52dca2"),
    "softplus": Colour("#ba60a9", "#d091ce"),
    "identity": Colour("#674f0c", "#fdda0f"),
    "relu6": Colour("#0f5b7a", "#96e4ff"),
    "sigmoid": Colour("#393939", "#918c86"),
    "silu": Colour("#279577", "#b5fad6"),
    "cube": Colour("#75090c", "#de3a47"),
    "sparsemax": Colour("#696d0f", "#f4e994"),
    "entmax15": Colour("#7d86f1", "#92aafe"),
}
ALL = (PAPER, INK, SOFT, RULE, GOOD, BAD, OPEN, *PHI.values())

# Names that papers use for some of them.
NAMES = {**{name: name for name in PHI}, "ReLUFormer": "relu", "ReLA": "relu", "1.5-entmax": "entmax15"}
_NAMED = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(NAMES, key=len, reverse=True)))})(?!\w)")

# A drawing up to the place of its style sheet: the title must come first to be read aloud.
_START = re.compile(r"<svg\b[^>]*>(?:\s*<(title|desc)>.*?</\1>)*", re.DOTALL)

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


def activation(words: str, otherwise: str = "") -> str:
    """Return the activation of the first φ named: relu in "relu/L, pico/4, seed 0", softmax in "softmax + LN"."""
    match = _NAMED.search(words)
    return NAMES[match[0]] if match else otherwise


def colour_of(words: str, otherwise: str = "") -> Colour:
    """Return the colour of the first φ named, or of the activation `otherwise`; grey if it has none."""
    return PHI.get(activation(words, otherwise), SOFT)


def for_both(svg: str) -> str:
    """Make a drawing in light colours turn dark with the page or the system around it.

    The colours stay in the drawing: a viewer without style sheets shows the light ones.
    """
    used = [colour for colour in ALL if colour.light in svg]
    rules = "".join(
        f'[style*="{part}: {light}"],[{part}="{light}"]{{{part}:{dark}!important}}'
        for light, dark in used
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg or f'{part}="{light}"' in svg
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    return _START.sub(lambda start: f"{start[0]}\n {style}", svg, count=1)


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

    An .svg turns dark with the page around it, in the colours above.
    """
    buffer = io.BytesIO()
    if suffix == ".png":
        figure.savefig(buffer, format="png", dpi=144, metadata={"Title": title, "Description": description})
        return buffer.getvalue()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue().decode()
    text = text.replace("<svg", f'<svg role="img" aria-label={quoteattr(title)}', 1)
    text = text.replace("</title>", f"</title>\n <desc>{escape(description)}</desc>", 1)
    return for_both(_PLACES.sub(_rounded, text)).encode()


def _rounded(places: re.Match[str]) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(places[0].split()))
