"""How φ are given on the command line, and what they are called in progress, tables and folders."""

import re

from nomax.nn import RELUFORMER
from nomax.phi import Phi

NAMED = {"reluformer": str(Phi.parse(RELUFORMER))}  # a φ that nobody wants to type


def spoken(phi: str) -> str:
    """A φ as people call it: its name, if it has one, or else as it is written."""
    return {written: name for name, written in NAMED.items()}.get(phi, phi)


def slug(text: str) -> str:
    """A text as part of a file name: "relu/L" is relu-L."""
    return re.sub(r"[^\w.+]+", "-", text).strip("-.")


def check_phis(phis: tuple[str, ...]) -> list[str]:
    """Each φ in its normal spelling; the same one twice is a slip."""
    if not phis:
        raise ValueError("--phi needs at least one φ, such as relu/L.")
    normal = [str(Phi.parse(NAMED.get(phi.casefold(), phi))) for phi in phis]
    if len({slug(phi) for phi in normal}) < len(normal):
        raise ValueError(f"--phi {' '.join(phis)}: the same φ is there twice.")
    return normal
