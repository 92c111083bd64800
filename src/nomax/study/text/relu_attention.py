"""Can ReLU replace softmax in attention for text? Softmax, ReLUFormer without each of its parts, and other maps.

    nomax data get bible-en-es
    nomax study relu-attention                  minutes, with a smaller model
    nomax study relu-attention --setup hour     half an hour on two cores
    nomax study relu-attention --setup day      four hours of one core; models that translate

Translation models that differ in their attention alone, each kind with the settings that text-rate chose on the
validation split. It judges the loss and BLEU on the test split, and measures the entropy of results and their zeros in
trained models, and how long untrained ones take to read and predict a batch. What came out:
results/relu-attention/verdicts.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch

from nomax import _figures
from nomax.models import ReLUFormer, ReLUFormerConfig
from nomax.phi import SOFTMAX
from nomax.study.engine.experiment import (
    ATTENTIONS,
    RELUFORMERS,
    Experiment,
    Measurement,
    TextExperiment,
    cpu_seconds,
)
from nomax.study.engine.figure import BROKEN, Figure, Table, draw_intervals, nothing_yet, sheet
from nomax.study.engine.result import Numbers, Result, TextResult, measured, trained, where
from nomax.study.engine.statistics import Interval, comparison, differences, pooled, ratio, turned
from nomax.study.engine.verdict import Verdict, above, difference, plain, spread, worst
from nomax.study.text.setup import TextSetup
from nomax.study.text.shared import MARGIN, Lead, Panel, basis, compare, judged, listing, loss, measurement, translates
from nomax.train.console import Stop

TITLE = "Can ReLU replace softmax in attention for text?"
CLAIMS = ("S-diverge", "S-factor", "S-losses", "S-speed")
KIND = "text"

DIRECT, OURS = "relu", RELUFORMERS[True, True]
FACTOR, UNNORMALISED = RELUFORMERS[False, False], RELUFORMERS[False, True]
# A loss so much higher than softmax's is called not to converge: e times its perplexity. A run that breaks off, and so
# counts as a uniform guess, is further away than that as soon as softmax has learned which words are frequent.
GAP = 1.0
ASKED = 6  # of the kinds are in a claim
BLEU = (
    "The paper has 34.22 BLEU for softmax, 33.19 for the factor alone, 34.56 with both losses and 33.19 without that "
    "of normalisation; ReLU put in directly diverges (IWSLT14)."
)
ROUNDS = 9  # each times every kind once, so whatever else the machine does meets all of them
BATCH = 16
AS_FAST = 0.9  # "as fast": at most a tenth slower
FASTER = 1.5  # "about 1.7 times as fast": at least so much
SPARSE = ("sparsemax", "1.5-entmax")


@dataclass(frozen=True)
class Speed(Measurement):
    """The CPU time of one pass of untrained models over sequences of full length, kind after kind in each round."""

    kind: ClassVar[str] = "speed"
    alone: ClassVar[bool] = True

    model: ReLUFormerConfig
    """ReLUFormer; the others differ in their attention alone."""
    batch: int = BATCH
    rounds: int = ROUNDS

    @property
    def variant(self) -> str:
        return f"{self.model.dim} wide, {self.model.encoder_layers}+{self.model.decoder_layers} layers"

    @property
    def tokens(self) -> int:
        return self.model.max_length

    @property
    def flops(self) -> int:
        """Floating point operations of all passes."""
        return 2 * len(ATTENTIONS) * (self.rounds + 1) * self.model.macs * self.batch * self.tokens

    def measure(self, stop: Stop) -> Numbers | None:
        """Return the seconds of each kind, by round."""
        models = {OURS: _untrained(self.model)}
        for phi, name in ATTENTIONS.items():
            models[name] = _untrained(replace(self.model, phi=phi, learned_gain=None, gamma=1.0))
        generator = torch.Generator().manual_seed(0)
        source, target = torch.randint(5, self.model.vocabulary, (2, self.batch, self.tokens), generator=generator)
        with torch.inference_mode():
            calls = {name: partial(model, source, target) for name, model in models.items()}
            return cpu_seconds(calls, self.rounds, stop)


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[Experiment]:
    """Return ten kinds of attention and their speed; what claims compare comes first, with all its seeds."""
    by_seed = [_kinds(setup, seed) for seed in seeds]
    asked = [run for some in by_seed for run in some[:ASKED]]
    shown = [run for some in by_seed[: setup.shown_seeds] for run in some[ASKED:]]
    return [*asked, speed_to_measure(setup), *shown]


def speed_to_measure(setup: TextSetup) -> Speed:
    """Return the measurement of all kinds."""
    return Speed(setup.reluformer().config.model)


def figures(results: Sequence[Result], setup: TextSetup) -> list[Figure]:
    """Draw loss, BLEU, entropy and zeros of each kind, and the times."""
    panels = [
        Panel("test loss (nats)", loss),
        Panel("BLEU", measurement("bleu")),
        Panel("entropy", measurement("entropy")),
        Panel("zeros", measurement("zeros")),
    ]
    title = "Ten kinds of attention in the same translation model"
    caption = (
        f"{BLEU} Entropy: in nats, of rows of weights divided by their sum. Zeros: of the weights of visible keys. "
        "Both on test sentences, means over rows, heads and all attentions. Learning rates are those of text-rate."
    )
    named = {"name": "relu-attention", "title": title, "caption": caption}
    return [
        listing(trained(results), panels, lambda result: result.attention, **named),
        speed_figure(setup, seconds_by_kind(results)),
    ]


def verdicts(results: Sequence[Result], setup: TextSetup) -> list[Verdict]:
    """Judge the four claims."""
    models = trained(results)
    return [
        _diverges(models),
        _factor(models),
        _losses(models),
        speed_verdict(setup, seconds_by_kind(results)),
    ]


def _kinds(setup: TextSetup, seed: int) -> list[TextExperiment]:
    return [
        setup.run(SOFTMAX, seed=seed),
        *(setup.reluformer(losses=losses, seed=seed) for losses in sorted(RELUFORMERS, reverse=True)),
        setup.run("relu", seed=seed),
        setup.run("relu/L", seed=seed),
        setup.run("sparsemax", seed=seed),
        setup.run("entmax15", seed=seed),
        setup.run("relu", joined_norm="rela", seed=seed),
    ]


def _compared(results: Sequence[TextResult], first: str, second: str) -> tuple[Lead, str, list[TextResult]]:
    """Return how far the first is ahead of the second, what that rests on in words, and its runs."""
    chosen = where(results, attention=first) + where(results, attention=second)
    ahead = compare(where(results, attention=first), where(results, attention=second), "data")
    return ahead, basis(chosen, ahead.cells), chosen


def _diverges(results: Sequence[TextResult]) -> Verdict:
    behind, rests_on, compared = _compared(results, SOFTMAX, DIRECT)
    used = where(results, attention=DIRECT)
    broken = sum(result.status == "diverged" for result in used)
    sentence = (
        f"The loss of softmax is {behind.words()} than with ReLU put in directly ({rests_on}); {broken} of {len(used)} "
        f"runs broke off. {BLEU} Not to converge is to be {GAP:g} nat behind: reproduced if the interval is above, "
        "contradicted if below."
    )
    numbers = {"behind": behind.loss, "BLEU behind": behind.bleu_numbers, "broke off": broken}
    noise = {"the gap": comparison(behind.cells, [GAP], margin=MARGIN, unit="nats")}
    premises = [translates(results, "data")]
    return judged("S-diverge", above(behind.loss, GAP), sentence, compared, numbers, premises, comparisons=noise)


def _factor(results: Sequence[TextResult]) -> Verdict:
    behind, rests_on, compared = _compared(results, SOFTMAX, FACTOR)
    sentence = (
        f"The loss of softmax is {behind.words()} than with the factor alone ({rests_on}). {BLEU} Reproduced if the "
        f"interval is above 0 and below {GAP:g} nat, contradicted if it lies outside."
    )
    outcome = worst([above(behind.loss, 0), above(turned(behind.loss), -GAP)])
    noise = {"the gap": comparison(behind.cells, [0.0, GAP], margin=MARGIN, unit="nats")}
    premises = [translates(results, "data"), *behind.agreement]
    numbers = {"behind": behind.loss, "BLEU behind": behind.bleu_numbers}
    return judged("S-factor", outcome, sentence, compared, numbers, premises, comparisons=noise)


def _losses(results: Sequence[TextResult]) -> Verdict:
    ahead, rests_on, compared = _compared(results, OURS, SOFTMAX)
    gain, entropy = (_compared(results, OURS, other)[0] for other in (UNNORMALISED, RELUFORMERS[True, False]))
    ours, without = (where(results, attention=kind) for kind in (OURS, UNNORMALISED))
    fall = pooled(differences(ours, without, "data", measurement("entropy")))
    numbers: dict[str, Any] = {
        "over softmax": ahead.loss,
        "BLEU over softmax": ahead.bleu_numbers,
        "over no normalisation loss": gain.loss,
        "over no entropy loss": entropy.loss,
    }
    fallen = ""
    if fall.known:  # a run that broke off has no rows to look at, so the verdict does not hang on this
        numbers["entropy over no normalisation loss"] = fall
        fallen = f" Without that of normalisation the entropy of rows falls by {spread(fall)}, in the paper by 1.52."
    sentence = (
        f"With both losses the loss is {ahead.words()} than that of softmax ({rests_on}); it is "
        f"{difference(gain.loss, 'nats', 'lower', 'higher')} than without that of normalisation, and "
        f"{difference(entropy.loss, 'nats', 'lower', 'higher')} than without that of entropy.{fallen} {BLEU} To match "
        f"is to trail by no more than {MARGIN:g} nats: reproduced if the interval lies above that and that without the "
        "normalisation loss above 0, contradicted if one is below."
    )
    outcome = worst([above(ahead.loss, -MARGIN), above(gain.loss, 0)])
    noise = {
        "the lead over softmax": comparison(ahead.cells, [-MARGIN], margin=MARGIN, unit="nats"),
        "the gain by the normalisation loss": comparison(gain.cells, [0.0], margin=MARGIN, unit="nats"),
    }
    premises = [translates(results, "data"), *ahead.agreement]
    return judged("S-losses", outcome, sentence, compared, numbers, premises, comparisons=noise)


def seconds_by_kind(results: Sequence[Result]) -> Numbers:
    """Return the times that were measured, if they were."""
    return next((result.numbers for result in measured(results, Speed.kind)), {})


def ratios(seconds: Numbers) -> dict[str, Interval]:
    """Return how many times as long as ReLUFormer each other kind takes."""
    return {name: ratio(times, seconds[OURS]) for name, times in seconds.items() if name != OURS}


def speed_verdict(setup: TextSetup, seconds: Numbers) -> Verdict:
    """Judge whether ReLUFormer is as fast as softmax and faster than the sparse maps."""
    times = ratios(seconds)
    scale = f"{BATCH} sequences of {setup.length} tokens on each side, {setup.dim} wide, {setup.layers}+{setup.layers} "
    scale += "layers, untrained, one CPU thread"
    if not set(SPARSE) <= set(times):
        sentence = "No time has been measured yet: nothing to judge."
        return Verdict("S-speed", "undecided", sentence, scale, [0], plain(times))
    listed = ", ".join(f"{name} {spread(interval, 2)}" for name, interval in times.items())
    sentence = (
        f"Times of one pass, in those of ReLUFormer: {listed} ({ROUNDS} interleaved rounds of CPU time). The paper has "
        f"about 1 and 1.7, of whole translations. Reproduced if the interval of softmax is above {AS_FAST:g} and those "
        f"of sparsemax and 1.5-entmax above {FASTER:g}, contradicted if one is below."
    )
    outcome = worst([above(times[SOFTMAX], AS_FAST), *(above(times[name], FASTER) for name in SPARSE)])
    numbers = {**times, "seconds": dict(seconds)}
    return Verdict("S-speed", outcome, sentence, scale, [0], plain(numbers))


def speed_figure(setup: TextSetup, seconds: Numbers) -> Figure:
    """Draw the times of each kind, in those of ReLUFormer."""
    relative = ratios(seconds)
    rows = tuple(
        (name, round(1e3 * median(times), 2), round(relative[name].mean if name in relative else 1.0, 3))
        for name, times in seconds.items()
    )
    title = "How long a pass takes"
    caption = (
        f"CPU time of one pass of untrained models over {BATCH} sequences of {setup.length} tokens on each side, "
        f"relative to ReLUFormer: means over {ROUNDS} interleaved rounds, with 95 % intervals. The paper has about 1 "
        "for softmax and 1.7 for sparsemax and 1.5-entmax."
    )
    words = "; ".join(f"{name} {times:g} times" for name, _, times in rows if name != OURS)
    alternative = f"Time of one pass relative to ReLUFormer: {words}."
    table = Table(("kind", "milliseconds", "relative to ReLUFormer"), rows)
    return Figure("speed", title, caption, alternative, table, lambda: _paint_speed(relative))


def _untrained(config: ReLUFormerConfig) -> ReLUFormer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ReLUFormer.from_config(config).eval()


def _paint_speed(times: Mapping[str, Interval]) -> Any:
    picture, (axis,) = sheet(1, height=2.6)
    if not times:
        nothing_yet(axis)
        return picture
    draw_intervals(axis, times, [_figures.colour_of(name).light for name in times])
    axis.axvline(1, color=_figures.colour_of("relu").light, lw=1.3, ls=BROKEN)
    axis.set_xlabel("time relative to ReLUFormer")
    return picture
