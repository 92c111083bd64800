"""Draw loss against zeros, the blocks that could be skipped, and what skipping gains."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from nomax import _figures
from nomax._figures import PAPER
from nomax.phi import SOFTMAX
from nomax.study.engine.blocks import BOUNDS, ORDERS, SIZES
from nomax.study.engine.figure import Figure, Table, handle, legend, nothing_yet, percent_axis, sheet
from nomax.study.text.shared import loss
from nomax.study.zeros.kinds import NONE, PAYS, Found, error, gain, lengths_of, mean_of, measured, values_of

# The activation whose colour a line has, its marker, and its style.
LINES: Mapping[str, tuple[str, str, str]] = {
    SOFTMAX: (SOFTMAX, "", "--"),
    NONE.line: ("", "", "--"),
    "fixed shift": ("relu", "o", "-"),
    "learned shift": ("relu", "D", "-"),
    "L1 penalty": ("relu", "P", "--"),
    "relu2": ("relu2", "s", "-"),
    "relu, threshold": ("relu", "^", ":"),
    "relu2, threshold": ("relu2", "v", ":"),
}
LEAST = 1e-4  # the least share of weights that a figure tells from none
TICKS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3, 1e-3, LEAST)
SHOWN = 65_536  # keys whose blocks are shown


def frontier(text: Found, images: Found) -> Figure:
    panels: tuple[tuple[str, Found, Any], ...] = (("text", text, loss), ("images", images, error))
    columns = ("data", "kind", "weights that are zero", "loss or error", "lowest", "highest", "empty rows", "seeds")
    rows = tuple(
        (
            name,
            kind.name,
            _rounded(mean_of(results, measured("zeros"))),
            *(_rounded(function(values_of(results, score))) for function in (fmean, min, max)),
            _rounded(mean_of(results, measured("empty_rows"))),
            len(results),
        )
        for name, found, score in panels
        for kind, results in found.items()
        if values_of(results, score)
    )
    words = "; ".join(f"{row[1]} of {row[0]}: {row[3]:.4g} with {row[2]} zeros" for row in rows if row[2] is not None)
    caption = (
        "Left: the test loss in nats of a language model; right: the test error of a vision transformer; over the "
        "share of weights that are not zero, fewer to the right. Broken lines: softmax, and a model without attention. "
        "Beside a point is its shift, its β or its λ, and its mean if that is far above. Means over seeds, bars from "
        f"lowest to highest. A share below {LEAST:g} is drawn there. {_models(text, images)}"
    )
    title = "What more zeros cost"
    alternative = f"Loss or error, and the share of weights that are zero. {words or 'Nothing has been measured yet'}."
    return Figure("zeros", title, caption, alternative, Table(columns, rows), lambda: _paint_frontier(panels))


def _models(*both: Found) -> str:
    variants = dict.fromkeys(
        f"{result.variant} on {result.data}" for found in both for some in found.values() for result in some
    )
    return f"Models: {'; '.join(variants)}." if variants else ""


def _paint_frontier(panels: Sequence[tuple[str, Found, Any]]) -> Any:
    picture, axes = sheet(len(panels), height=4.6, same_y=False)
    lines: dict[str, None] = {}
    for axis, (name, found, score) in zip(axes, panels, strict=True):
        shown = {kind: results for kind, results in found.items() if values_of(results, score)}
        if not shown:
            nothing_yet(axis)
            continue
        top = _top(shown, score)
        for line in dict.fromkeys(kind.line for kind in shown):
            lines[line] = None
            _draw_line(axis, line, {kind: some for kind, some in shown.items() if kind.line == line}, score, top)
        axis.set_title(f"{name}: {'test loss (nats)' if score is loss else 'test error'}")
        axis.set_xlabel("weights that are not zero")
        axis.set_xscale("log")
        left, right = sorted(axis.get_xlim(), reverse=True)
        axis.set_xticks([share for share in TICKS if right <= share <= left], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_xlim(left, right)
        axis.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        if score is error:
            percent_axis(axis)
    if lines:
        legend(picture, [handle(line, **_look(line)) for line in lines], columns=3)
    return picture


def _look(line: str) -> dict[str, Any]:
    activation, marker, style = LINES[line]
    look = {"color": _figures.colour_of(activation).light, "marker": marker, "ls": style, "ms": 6.5, "lw": 1.4}
    return look if style == "-" else look | {"mfc": PAPER.light}


def _top(shown: Found, score: Callable[[Any], float | None]) -> float:
    """Return where a panel ends: a bit above the model without attention, which is as far as a cost is of interest."""
    means = {kind: fmean(values_of(results, score)) for kind, results in shown.items()}
    none, lowest = means.get(NONE, math.inf), min(means.values())
    return none + 0.5 * (none - lowest) if lowest < none < math.inf else math.inf


def _draw_line(axis: Any, line: str, found: Found, score: Callable[[Any], float | None], top: float) -> None:
    look, places, means = _look(line), [], []
    if all(kind.level for kind in found):
        for results in found.values():
            axis.axhline(fmean(values_of(results, score)), color=look["color"], ls=look["ls"], lw=look["lw"])
        return
    for kind, results in found.items():
        values = values_of(results, score)
        places.append(max(LEAST, 1 - (mean_of(results, measured("zeros")) or 0)))
        mean = fmean(values)
        apart = (-14, 6) if look["ls"] == "-" else (6, -14)  # labels of two lines stay clear of each other
        means.append(min(mean, top))
        ends = [min(value, top) for value in (min(values), max(values))]
        axis.plot([places[-1]] * 2, ends, lw=1.6, color=look["color"], alpha=0.5)
        said = kind.mark if mean <= top else f"{kind.mark}: {mean:.3g} ↑"
        axis.annotate(said, (places[-1], means[-1]), apart, textcoords="offset points", fontsize=9.5)
    axis.plot(places, means, **look)


def blocks(text: Found, images: Found) -> Figure:
    shown = {name: (found, keys) for name, found in (("text", text), ("images", images)) if (keys := _shown(found))}
    parts = [(size, part) for size in SIZES for part in ("zero", *BOUNDS)]
    columns = ("data", "keys", "kind", "order", "zeros", *(f"{size} {part}" for size, part in parts))
    rows = tuple(
        (
            name,
            keys,
            kind.name,
            order,
            _rounded(mean_of(results, measured(f"cache_zeros {keys}"))),
            *(_rounded(mean_of(results, measured(f"{order} {size} {part} {keys}"))) for size, part in parts),
        )
        for name, (found, keys) in shown.items()
        for kind, results in found.items()
        if values_of(results, measured(f"cache_zeros {keys}"))
        for order in ORDERS
    )
    caption = (
        "Of the weights of one query: those that are zero; blocks whose weights are all zero, of 16 and of 256 keys; "
        "and blocks of 16 that a bound can tell, the better of box and ball; keys halved across their principal "
        "directions until 16 are left. Means over layers and heads. In the table also the order of the text, and one "
        "principal direction; blocks that are all zero beside those that each bound tells."
    )
    words = "; ".join(
        f"{row[2]} of {row[0]}: {row[4]} zeros, {row[5]} of blocks, {max(row[6], row[7])} told"  # type: ignore[type-var]
        for row in rows
        if row[3] == "halved"
    )
    alternative = f"Zeros, all-zero blocks of 16 keys, and those that a bound tells. {words or 'Nothing yet'}."
    title = "Zeros, blocks of zeros, and blocks that a bound can tell"
    table = Table(columns, rows)
    return Figure("zeros-blocks", title, caption, alternative, table, lambda: _paint_blocks(shown))


def _shown(found: Found) -> int:
    """Return the number of keys whose blocks a figure shows; 0 if there is none."""
    return max((keys for keys in lengths_of(found) if keys <= SHOWN), default=0)


def _paint_blocks(shown: Mapping[str, tuple[Found, int]]) -> Any:
    kinds = {kind: None for found, _ in shown.values() for kind in found if not kind.level}
    picture, axes = sheet(max(len(shown), 1), height=1.7 + 0.33 * max(len(kinds), 3))
    if not shown:
        nothing_yet(axes[0])
        return picture
    ink, soft = _figures.INK.light, _figures.SOFT.light
    looks: dict[str, dict[str, Any]] = {
        "weights": {"marker": "o", "color": _figures.colour_of("relu").light, "ms": 7, "ls": ""},
        "blocks of 16": {"marker": "s", "color": ink, "ms": 6.5, "ls": ""},
        "blocks of 256": {"marker": "s", "color": soft, "mfc": PAPER.light, "ms": 6.5, "ls": ""},
        "told by a bound": {"marker": "X", "color": _figures.BAD.light, "ms": 7, "ls": ""},
    }
    for axis, (name, (found, keys)) in zip(axes, shown.items(), strict=True):
        for place, kind in enumerate(kinds):
            told = [mean_of(found.get(kind, ()), measured(f"halved 16 {bound} {keys}")) for bound in BOUNDS]
            values = (
                mean_of(found.get(kind, ()), measured(f"cache_zeros {keys}")),
                mean_of(found.get(kind, ()), measured(f"halved 16 zero {keys}")),
                mean_of(found.get(kind, ()), measured(f"halved 256 zero {keys}")),
                max((value for value in told if value is not None), default=None),
            )
            for value, look in zip(values, looks.values(), strict=True):
                if value is not None:
                    axis.plot(value, place, **look)
        axis.set_title(f"{name}, {keys:,} keys")
        axis.set_xlim(-0.04, 1.04)
        axis.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        axis.grid(axis="x")
        axis.set_xlabel("share")
    axes[0].set_yticks(range(len(kinds)), [kind.name for kind in kinds])
    axes[0].invert_yaxis()
    legend(picture, [handle(name, **look) for name, look in looks.items()])
    return picture


def speed(text: Found) -> Figure:
    columns = (
        "kind",
        "keys",
        "order",
        "block",
        "bound",
        "ms over all",
        "ms of the bound",
        "ms over the rest",
        "copied",
        "gain",
        "gain, copied",
    )
    rows = tuple(
        (
            kind.name,
            keys,
            order,
            " ".join(f"{value:g}" for value in dict.fromkeys(values_of(results, measured(f"{order} size {keys}")))),
            " ".join(
                "box" if value else "ball"
                for value in dict.fromkeys(values_of(results, measured(f"{order} box {keys}")))
            ),
            *(
                _rounded(1e3 * (mean_of(results, measured(f"{name} {keys}")) or math.nan))
                for name in (
                    "dense_seconds",
                    f"{order} bound_seconds",
                    f"{order} left_seconds",
                    f"{order} copied_seconds",
                )
            ),
            *(_rounded(mean_of(results, gain(order, keys, left))) for left in ("left", "copied")),
        )
        for kind, results in text.items()
        for keys in lengths_of(text)
        for order in ORDERS
        if values_of(results, gain(order, keys))
    )
    caption = (
        "CPU time of attention of one query and head over all keys, divided by that of a bound and of attention over "
        "the blocks that it leaves, as if they lay together: the best of three orders, each with the block and bound "
        "that leave the least to read. Medians of rounds, means over queries, layers, heads and seeds, one thread. "
        f"Beyond the broken line, at {PAYS:g}, it would pay."
    )
    words = "; ".join(f"{row[0]} at {row[1]:,} keys, {row[2]}: {row[-2]} times" for row in rows)
    alternative = f"What skipping blocks gains. {words or 'Nothing has been measured yet'}."
    title = "What skipping blocks of zeros gains in decoding"
    return Figure("zeros-speed", title, caption, alternative, Table(columns, rows), lambda: _paint_speed(text))


def _paint_speed(text: Found) -> Any:
    picture, (axis,) = sheet(1, height=4.2)
    lengths = lengths_of(text)
    drawn = 0
    for kind, results in text.items():
        line = {
            keys: max(gains)
            for keys in lengths
            if (gains := [mean for order in ORDERS if (mean := mean_of(results, gain(order, keys))) is not None])
        }
        if line:
            look = _look(kind.line) | {"marker": _figures.MARKERS[drawn % len(_figures.MARKERS)]}
            axis.plot(list(line), list(line.values()), label=kind.name, **look)
            drawn += 1
    if not drawn:
        nothing_yet(axis)
        return picture
    axis.axhline(1, color=_figures.SOFT.light, lw=1)
    axis.axhline(PAYS, color=_figures.INK.light, lw=1.3, ls=(0, (5, 3)))
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{keys // 1024:,} k" for keys in lengths])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("keys")
    axis.set_ylabel("times as fast")
    legend(picture, axis.get_legend_handles_labels()[0], columns=3)
    return picture


def _rounded(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.4g}")
