"""Which learning rate, and how strong the penalties? Both chosen once, for all studies of text.

    nomax data get bible-en-es
    nomax study text-rate --setup hour --seeds 2     a quarter of an hour on two cores

This is how two numbers of the set-ups were chosen. The learning rate is softmax's best, so that nothing is tuned in
favour of another φ. The weight of ReLUFormer's two penalties, which the paper does not tell, is ReLUFormer's best at
that rate. It judges no claim. What came out: results/text-rate/rate.svg and penalty.svg.
"""

from collections.abc import Sequence
from dataclasses import replace

from nomax.phi import SOFTMAX
from nomax.study.figure import Figure
from nomax.study.row import TextRow
from nomax.study.text_figure import Panel, figure
from nomax.study.text_run import TextRun
from nomax.study.text_scores import loss, measurement
from nomax.study.text_setup import TextSetup
from nomax.study.verdict import Verdict

TITLE = "Which learning rate, and how strong the penalties?"
CLAIMS: tuple[str, ...] = ()
KIND = "text"

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
PENALTIES = (0.01, 0.1, 1.0)


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TextRun]:
    """Softmax with every rate, and ReLUFormer with every weight. One seed after the other."""
    return [
        run
        for seed in seeds
        for run in (
            *(replace(setup, lr=rate).run(SOFTMAX, seed=seed) for rate in RATES),
            *(replace(setup, penalty=weight).reluformer(seed=seed) for weight in PENALTIES),
        )
    ]


def figures(rows: Sequence[TextRow], setup: TextSetup) -> list[Figure]:
    """The loss over the learning rate, and over the weight of the penalties."""
    softmax = [row for row in rows if row.activation == SOFTMAX]
    ours = [row for row in rows if row.activation != SOFTMAX]
    panels = [
        Panel("test loss (nats)", loss),
        Panel("entropy", measurement("entropy")),
        Panel("zeros", measurement("zeros")),
    ]
    return [
        figure(
            softmax,
            panels[:1],
            lambda row: row.attention,
            lambda row: row.lr,
            name="rate",
            title="Softmax over the learning rate",
            caption=f"The set-up in use has {setup.lr:g}.",
            axis="learning rate",
            logarithmic=True,
        ),
        figure(
            ours,
            panels,
            lambda row: row.attention,
            lambda row: row.penalty,
            name="penalty",
            title="ReLUFormer over the weight of its two penalties",
            caption=f"The set-up in use has {setup.penalty:g}, and a learning rate of {setup.lr:g}.",
            axis="weight of both penalties",
            logarithmic=True,
        ),
    ]


def verdicts(rows: Sequence[TextRow], setup: TextSetup) -> list[Verdict]:
    """None: this study chooses two numbers."""
    return []
