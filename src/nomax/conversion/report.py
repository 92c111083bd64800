"""What a conversion did: a table to print, and the same as attributes."""

import io
from dataclasses import dataclass

from nomax.console import WIDE, Console, Table


class ConversionError(ValueError):
    """A model cannot be converted as asked; it is as it was before."""


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model, and what became of it."""

    name: str
    """The module's name in the model."""
    module: str
    """Its class."""
    kind: str
    """How it computes attention: "interface" (transformers' attention interface), "sdpa"
    (F.scaled_dot_product_attention), "multihead" (nn.MultiheadAttention), "nomax" (nomax.nn.Attention), or "softmax", a
    softmax of its own."""
    num_heads: int | None
    before: str
    """φ before the conversion."""
    after: str
    """φ after it."""
    reason: str = ""
    """Why it was left as it was, if it was."""


@dataclass(frozen=True)
class Report:
    """The attention layers of a model that were converted, and those that were left. Print it for a table."""

    model: str
    converted: tuple[Layer, ...]
    left: tuple[Layer, ...]

    def __rich__(self) -> Table:
        count = len(self.converted) + len(self.left)
        table = Table(
            title=f"{self.model}: {len(self.converted)} of {count} attention layers converted", title_justify="left"
        )
        for heading in ("module", "class", "kind", "heads", "φ before", "φ after", "left because"):
            if heading != "left because" or self.left:
                table.add_column(heading, justify="right" if heading == "heads" else "left")
        for layer in (*self.converted, *self.left):
            heads = "" if layer.num_heads is None else str(layer.num_heads)
            cells = [layer.name, layer.module, layer.kind, heads, layer.before, layer.after, layer.reason]
            table.add_row(*cells[: len(table.columns)])
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=WIDE).print(self)  # whatever the window is: nothing wraps
        return text.getvalue().rstrip("\n")
