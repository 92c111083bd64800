"""What finetune.json says, for people: a table in the terminal, the same in Markdown, and a figure."""

from collections.abc import Mapping
from typing import Any

from rich import box

from nomax import _figures
from nomax.console import Table

SEARCH, RETRIEVAL = "search", "retrieval"
SHARES = (SEARCH, RETRIEVAL, "accuracy", "agreement")  # measures that are shown in percent
COSINE = "cosine at "  # before the number of tokens
TITLE = "Back to the original's embeddings"
POINTS = 40  # of the curve, each the mean of several steps


def table(result: Mapping[str, Any]) -> Table:
    """Return the stages of a result as a table, as the command prints it."""
    stages = result["stages"]
    titles = list(next(iter(stages.values())))
    made = Table(box=box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    made.add_column("")
    for title in titles:
        made.add_column(title, justify="right", no_wrap=True)
    for name, measured in stages.items():
        made.add_row(name, *(_shown(title, measured[title]) for title in titles))
    return made


def markdown(result: Mapping[str, Any]) -> str:
    """Return the same table in Markdown, with the command that wrote it."""
    stages = result["stages"]
    titles = list(next(iter(stages.values())))
    rows = [["", *titles], ["---", *("---:" for _ in titles)]]
    rows += [[name, *(_shown(title, measured[title]) for title in titles)] for name, measured in stages.items()]
    lines = [f"<!-- Written by `{result['command']}` -->", "", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def _shown(title: str, value: float) -> str:
    return f"{value:.2%}" if title in SHARES else f"{value:.4f}"


def figure(result: Mapping[str, Any]) -> bytes | None:
    """Draw the cosines of each stage by length, and beside them how distillation went, as an .svg.

    None if there is nothing of the kind: a classifier has no embeddings to compare, and calibration alone no curve.
    """
    stages, steps = result["stages"], result.get("distillation", {}).get("steps", [])
    titles = [title for title in next(iter(stages.values())) if title.startswith(COSINE)]
    if not titles or len(steps) < 2:
        return None
    names = [name for name in stages if name != "original"]
    matplotlib = _figures.require()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_figures.STYLE):
        drawn = Figure(figsize=(7.6, 3.3), layout="constrained")
        left, right = drawn.subplots(1, 2, sharey=True, width_ratios=(2, 3))
        colours = (_figures.PHI["relu"], _figures.PHI["softmax"], _figures.PHI["gelu"])
        for title, colour, marker in zip(titles, colours, _figures.MARKERS, strict=False):
            cosines = [stages[name][title] for name in names]
            label = f"{title.removeprefix(COSINE)} tokens"
            left.plot(names, cosines, color=colour.light, marker=marker, lw=1.6, label=label)
        tokens, running = _curve(steps)
        right.plot(tokens, running, color=_figures.INK.light, lw=1.4)
        left.set_title("texts that it did not learn from")
        right.set_title("texts of all lengths, as it learned from them")
        right.set_xlabel("tokens (thousands)")
        left.set_ylabel("mean cosine to the original")
        left.legend(frameon=False)
        for axis in (left, right):
            axis.grid(axis="y")
            axis.margins(x=0.1 if axis is left else 0.03)
        measured = "; ".join(f"{name}: {', '.join(f'{stages[name][title]:.3f}' for title in titles)}" for name in names)
        description = (
            f"Mean cosine to the original's embeddings at {', '.join(t.removeprefix(COSINE) for t in titles)} tokens. "
            f"{measured}. While it learned, the cosine went from {running[0]:.3f} to {running[-1]:.3f}."
        )
        return _figures.rendered(drawn, ".svg", TITLE, description)


def _curve(steps: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    """Return tokens in thousands, and the cosine of the texts of a step, on average over several steps."""
    tokens, cosines = [], []
    size = max(len(steps) // POINTS, 1)
    for group in (steps[start : start + size] for start in range(0, len(steps), size)):
        tokens.append(group[-1]["positions"] / 1000)
        cosines.append(1 - sum(step["output"] for step in group) / len(group))
    return tokens, cosines
