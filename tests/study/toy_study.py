"""Does it matter which φ, in a study of seconds?

    nomax study tests/study/toy_study.py

It shows that the runner works. What came out: nothing.
"""

from dataclasses import replace

from nomax.study.engine.figure import Figure, Table, sheet
from nomax.study.engine.result import ImageResult, Result
from nomax.study.engine.verdict import Verdict

TITLE = "A study of seconds"
CLAIMS = ("W-h",)


def grid(setup, seeds):
    return [setup.run(phi, seed=seed) for seed in seeds for phi in ("softmax", "relu/L", "identity/L")]


def figures(results, setup):
    def paint():
        figure, axes = sheet(1)
        axes[0].plot([result.accuracy or 0 for result in results])
        return figure

    table = Table(("φ", "accuracy"), tuple((result.phi, result.accuracy) for result in results))
    return [Figure("toy", "A toy", "Nothing to see.", "A line.", table, paint)]


def verdicts(results, setup):
    seeds = sorted({result.seed for result in results})
    return [Verdict("W-h", "undecided", f"{len(results)} runs say nothing.", setup.data, seeds, {"runs": len(results)})]


def result(key: str = "0" * 16, **changes) -> Result:
    """A result that nobody computed."""
    facts = {
        "key": key,
        "status": "done",
        "phi": "relu/L",
        "activation": "relu",
        "alpha": 1.0,
        "variant": "mu/8",
        "size": "mu",
        "patch": 8,
        "tokens": 4,
        "qk_norm": True,
        "gate": None,
        "seed": 0,
        "data": "tiny",
        "classes": 4,
        "steps": 10,
        "batch_size": 8,
        "lr": 1e-3,
        "macs": 1000,
        "train_flops": 480_000,
        "accuracy": 0.5,
        "loss": 1.25,
        "seconds": 2.0,
        "core_seconds": 1.5,
    }
    return replace(ImageResult(**facts), **changes)
