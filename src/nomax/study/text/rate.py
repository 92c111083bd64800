"""Which settings suit which attention for text? Trials on the validation split, as many for each kind.

    nomax data get help-de-en
    nomax study text-rate --setup day     three hours of one core

Every kind of attention is trained, for fewer steps than the studies take, with each of the set-up's settings: learning
rate, warm-up, and the weight of ReLUFormer's losses. The studies train each kind with what came out best here. The test
split chooses nothing. It judges no claim. What came out: results/text-rate/text-rate.svg.
"""

from collections.abc import Callable, Sequence

from nomax.nn import RELUFORMER
from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import TextExperiment
from nomax.study.engine.figure import Figure
from nomax.study.engine.result import TextResult, where
from nomax.study.engine.verdict import Verdict
from nomax.study.text.setup import Settings, TextSetup
from nomax.study.text.shared import Panel, figure, loss, measurement

TITLE = "Which settings suit which attention for text?"
CLAIMS: tuple[str, ...] = ()
KIND = "text"


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TextExperiment]:
    """Return every kind with all settings that are tried. Trials have one seed of their own."""
    attentions: tuple[Callable[[Settings], TextExperiment], ...] = (
        lambda settings: setup.trial(settings, SOFTMAX),
        lambda settings: setup.trial(settings, RELUFORMER, reluformers=True, losses=(True, True)),
        lambda settings: setup.trial(settings, "relu/L"),
        lambda settings: setup.trial(settings, "relu"),
    )
    return [kind(settings) for settings in setup.trials for kind in attentions]


def figures(results: Sequence[TextResult], setup: TextSetup) -> list[Figure]:
    """Draw the validation loss over the learning rate, a line for each kind and its other settings."""
    best = best_trials(results)
    listed = "; ".join(
        f"{kind}: {result.lr:g}, {_others(result)} ({result.loss:.3f} nats)" for kind, result in best.items()
    )
    caption = f"Each kind has as many trials, of {_steps(results)} steps. Best: {listed}."
    caption = caption if best else "No trial has finished."
    panels = [Panel("validation loss (nats)", loss), Panel("BLEU", measurement("bleu"))]
    words = {"name": "text-rate", "title": TITLE, "caption": caption, "axis": "learning rate"}
    return [figure(results, panels, _line, lambda result: result.lr, logarithmic=True, **words)]


def verdicts(results: Sequence[TextResult], setup: TextSetup) -> list[Verdict]:
    """Judge nothing: this study chooses numbers."""
    return []


def best_trials(results: Sequence[TextResult]) -> dict[str, TextResult]:
    """Return the trial with the lowest loss of each kind."""
    attentions = dict.fromkeys(result.attention for result in results)
    done = {
        kind: [result for result in where(results, attention=kind) if result.loss is not None] for kind in attentions
    }
    return {kind: min(trials, key=lambda result: result.loss or 0.0) for kind, trials in done.items() if trials}


def _line(result: TextResult) -> str:
    return f"{result.attention}, {_others(result)}"


def _others(result: TextResult) -> str:
    penalty = f", losses × {result.penalty:g}" if result.penalty else ""
    return f"warm-up {result.warmup:,}{penalty}"


def _steps(results: Sequence[TextResult]) -> str:
    return ", ".join(f"{steps:,}" for steps in sorted({result.steps for result in results}))
