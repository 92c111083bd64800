"""The colours of figures and pages: one for each φ, distinct to colour-blind readers, for light and dark pages."""

import re
from typing import NamedTuple


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


def activation(words: str, otherwise: str = "") -> str:
    """Return the activation of the first φ named: relu in "relu/L, pico/4, seed 0", softmax in "softmax + LN"."""
    match = _NAMED.search(words)
    return NAMES[match[0]] if match else otherwise


def of(words: str, otherwise: str = "") -> Colour:
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
