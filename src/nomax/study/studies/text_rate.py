"""Which learning rates, where does γ start, and how strong are the penalties? Chosen once, for all studies of text.

    nomax data get bible-en-es
    nomax study text-rate --setup hour --seeds 1     twenty minutes on two cores

This is how four numbers of the set-ups were chosen: the learning rate of softmax, which is that of all φ but
ReLUFormer's, and three of ReLUFormer: its learning rate, where its γ starts, and the weight of its two penalties, of
which the paper tells nothing. Each of the three is varied around the choice of the others. It judges no claim. What
came out: results/text-rate/rate.svg, gamma.svg and penalty.svg.
"""

from collections.abc import Sequence
from dataclasses import replace

from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import TextExperiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.result import TextResult, where
from nomax.study.engine.verdict import Verdict
from nomax.study.studies.text_common import Panel, figure, loss, measurement
from nomax.study.text_setup import TextSetup

TITLE = "Which learning rates, where does γ start, and how strong are the penalties?"
CLAIMS: tuple[str, ...] = ()
KIND = "text"

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
GAMMAS = (1.0, 2.5, 6.4, 16.0)
PENALTIES = (0.01, 0.03, 0.1, 1.0)


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TextExperiment]:
    """Softmax with every rate; ReLUFormer with every rate, start and weight. One seed after the other."""
    runs = [
        run
        for seed in seeds
        for run in (
            *(replace(setup, lr=rate).run(SOFTMAX, seed=seed) for rate in RATES),
            *(replace(setup, reluformer_lr=rate).reluformer(seed=seed) for rate in RATES),
            *(replace(setup, gamma=gamma).reluformer(seed=seed) for gamma in GAMMAS),
            *(replace(setup, penalty=weight).reluformer(seed=seed) for weight in PENALTIES),
        )
    ]
    return list(dict.fromkeys(runs))  # what is chosen is in each of the three


def figures(rows: Sequence[TextResult], setup: TextSetup) -> list[Figure]:
    """The loss over the learning rate, over the start of γ, and over the weight of the penalties."""
    ours = [row for row in rows if row.activation != SOFTMAX]
    chosen = {"lr": setup.reluformer_lr, "gamma": setup.gamma, "penalty": setup.penalty}
    rates = _varied(ours, "lr", chosen) + [row for row in rows if row.activation == SOFTMAX]
    panels = [
        Panel("test loss (nats)", loss),
        Panel("entropy", measurement("entropy")),
        Panel("zeros", measurement("zeros")),
    ]
    in_use = "The set-up in use has {:g}."
    return [
        _figure(
            rates,
            panels[:1],
            "lr",
            name="rate",
            title="Softmax and ReLUFormer over the learning rate",
            caption=f"The set-up in use has {setup.lr:g} for softmax and {setup.reluformer_lr:g} for ReLUFormer.",
            axis="learning rate",
        ),
        _figure(
            _varied(ours, "gamma", chosen),
            panels,
            "gamma",
            name="gamma",
            title="ReLUFormer over the start of γ",
            caption=f"{in_use.format(setup.gamma)} With √(n/π), 6.4 for 128 keys, rows of a new model sum to about 1.",
            axis="γ at the start",
        ),
        _figure(
            _varied(ours, "penalty", chosen),
            panels,
            "penalty",
            name="penalty",
            title="ReLUFormer over the weight of its two penalties",
            caption=in_use.format(setup.penalty),
            axis="weight of both penalties",
        ),
    ]


def verdicts(rows: Sequence[TextResult], setup: TextSetup) -> list[Verdict]:
    """None: this study chooses numbers."""
    return []


def _varied(rows: Sequence[TextResult], name: str, chosen: dict[str, float]) -> list[TextResult]:
    """The runs that differ from the set-up's choice in this number alone."""
    others = {other: value for other, value in chosen.items() if other != name}
    return where(rows, **others)


def _figure(rows: Sequence[TextResult], panels: list[Panel], column: str, **said: str) -> Figure:
    return figure(rows, panels, lambda row: row.attention, lambda row: getattr(row, column), logarithmic=True, **said)
