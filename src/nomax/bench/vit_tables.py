"""The results of `nomax bench vit` as tables, on the terminal and in Markdown."""

from typing import Literal

import torch

from nomax.bench import tables
from nomax.bench.results import OURS, Case, Results
from nomax.console import Table
from nomax.nn.linear import SLOW

INFERENCE: Literal["inference"] = "inference"
TRAINING: Literal["training"] = "training"

# Whom we race: timm's ViT, ours with softmax, and ours with no attention at all.
TIMM, SOFTMAX, FREE = "timm", "our softmax", "free attention"


def _row(case: Case, batch: int) -> list[str]:
    """Images per second of ours and timm's, then ratios: timm's, our softmax's and no attention's time to ours."""
    speeds = [f"{batch / seconds:.3g}" if (seconds := case.best(name)) else "–" for name in (OURS, TIMM)]
    limit = tables.times(case.speedup(FREE, TIMM))
    return [*speeds, tables.times(case.speedup(OURS, TIMM)), tables.times(case.speedup(OURS, SOFTMAX)), limit]


COLUMNS = ("relu/L", "timm", "vs timm", "vs our softmax", "limit vs timm")


def model_table(name: str, batch: int, cases: list[Case]) -> Table:
    """All that was measured of one model."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", title=f"\nViT-{name}, {batch} images")
    for column in (
        "dtype",
        "mode",
        "thr.",
        "relu/L\nimages/s",
        "timm\nimages/s",
        "vs\ntimm",
        "vs our\nsoftmax",
        "limit",
    ):
        table.add_column(column, justify="left" if column in ("dtype", "mode") else "right", no_wrap=True)
    for case in cases:
        table.add_row(case.dtype, case.mode, str(case.threads), *_row(case, batch))
    return table


def markdown(results: Results) -> str:
    """The tables for the README, with what they were measured on."""
    parts = ["<!-- Written by `nomax bench vit`; the raw samples are in vit.json. -->"]
    if results.smoke:
        parts.append("**A smoke run: the models are toys and these numbers mean nothing.**")
    elif not results.finished:
        parts.append("**The run was stopped: these are its results until then.**")
    if red := results.red():
        lines = [f"- {gate.shape}, {gate.dtype}, {gate.name}: {gate.reason()}" for gate in red]
        parts.append("**Wrong results, and so no ratios, for:**\n\n" + "\n".join(lines))
    about, software = results.machine, results.versions
    parts.append(
        f"ViT with `relu/L` against timm's with softmax, same weights, 224 pixels, on {about['cpu']} "
        f"({about['cores']} cores, {about['kernels']} kernels), nomax {software['nomax']}, torch "
        f"{software['torch']}, timm {software['timm']}, {results.started[:10]}. Images per second; “vs” is the other's "
        f"time divided by ours, each the best of {results.options['rounds']} interleaved rounds (three for calls "
        "of over 2 s, one of over 8 s). “limit” is how many times as fast as timm our model would be if attention "
        "took no time. A training step is forward, backward and AdamW; bfloat16 is autocast for all."
    )
    if torch.bfloat16 in SLOW:
        parts.append(
            "This CPU has no products of bfloat16. PyTorch's linear layers then go element by element; ours compute in "
            "float32 and round the result, which is most of the difference in bfloat16."
        )
    batches = results.options["batch"]
    rows = [
        [f"{case.shape} ({batch} images)", case.dtype, case.mode, str(case.threads), *_row(case, batch)]
        for case in results.cases
        for batch in [batches[case.shape]]
    ]
    parts.append(tables.markdown_table(["model", "dtype", "mode", "threads", *COLUMNS], rows))
    goal_rows = [list(row) for row in tables.goal_rows(results)]
    parts.append("**Goals**\n\n" + tables.markdown_table(list(tables.GOAL_COLUMNS), goal_rows))
    return "\n\n".join(parts) + "\n"
