"""How long models with different attention take for a batch: CPU time of one pass, interleaved."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from nomax import _colours
from nomax.models import ReLUFormer, ReLUFormerConfig
from nomax.nn import RELUFORMER
from nomax.phi import SOFTMAX
from nomax.study.figure import Figure, Table, nothing_yet, sheet
from nomax.study.statistics import Interval, contrast
from nomax.study.text_run import NAMES
from nomax.study.text_scores import spread
from nomax.study.text_setup import TextSetup
from nomax.study.verdict import Verdict, above, plain, worst

ROUNDS = 9  # each times every kind once, so whatever else the machine does meets all of them
BATCH = 16
AS_FAST = 0.9  # "as fast": at most a tenth slower
FASTER = 1.5  # "about 1.7 times as fast": at least so much
OURS, SPARSE = "ReLUFormer", ("sparsemax", "1.5-entmax")


@lru_cache(maxsize=8)
def measure(setup: TextSetup) -> Mapping[str, tuple[float, ...]]:
    """Seconds of CPU time of each kind in each round: one pass of an untrained model over sequences of full length."""
    models = {OURS: _model(setup, RELUFORMER)}
    for phi, name in NAMES.items():
        if phi == SOFTMAX or find_spec("entmax") is not None:
            models[name] = _model(setup, phi)
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(5, setup.vocabulary, (2, BATCH, setup.length), generator=generator)
    found: dict[str, list[float]] = {name: [] for name in models}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for _ in range(ROUNDS + 1):
                for name, model in models.items():
                    start = time.process_time()
                    model(source, target)
                    found[name].append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return {name: tuple(times[1:]) for name, times in found.items()}  # the first round warms up


def ratios(found: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """How many times as long as ReLUFormer each other kind takes."""
    return {
        name: contrast([[other / ours for other, ours in zip(times, found[OURS], strict=True)]])
        for name, times in found.items()
        if name != OURS
    }


def verdict(setup: TextSetup, found: Mapping[str, tuple[float, ...]] | None = None) -> Verdict:
    """Whether ReLUFormer is as fast as softmax and faster than the sparse maps."""
    found = found or measure(setup)
    ratio = ratios(found)
    scale = f"{BATCH} sequences of {setup.length} tokens on each side, {setup.dim} wide, {setup.layers}+{setup.layers} "
    scale += "layers, untrained, one CPU thread"
    if not set(SPARSE) <= set(ratio):
        sentence = "The package entmax is not installed (pip install entmax): nothing to judge."
        return Verdict("S-speed", "undecided", sentence, scale, [0], plain(ratio))
    listed = ", ".join(f"{name} {spread(interval, 2)}" for name, interval in ratio.items())
    sentence = (
        f"Times of one pass, in those of ReLUFormer: {listed} ({ROUNDS} interleaved rounds of CPU time). The paper has "
        f"about 1 and 1.7, of whole translations. Reproduced if the interval of softmax is above {AS_FAST:g} and those "
        f"of sparsemax and 1.5-entmax above {FASTER:g}, contradicted if one is below."
    )
    outcome = worst([above(ratio[SOFTMAX], AS_FAST), *(above(ratio[name], FASTER) for name in SPARSE)])
    numbers = {**ratio, "seconds": dict(found)}
    return Verdict("S-speed", outcome, sentence, scale, [0], plain(numbers))


def figure(setup: TextSetup, found: Mapping[str, Sequence[float]]) -> Figure:
    """Times of each kind, in those of ReLUFormer."""
    ratio = ratios(found)
    rows = tuple(
        (name, round(1e3 * median(times), 2), round(ratio[name].mean if name in ratio else 1.0, 3))
        for name, times in found.items()
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
    return Figure("speed", title, caption, alternative, table, lambda: _paint(ratio))


def _model(setup: TextSetup, phi: str) -> ReLUFormer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ReLUFormer.from_config(_config(setup, phi)).eval()


def _config(setup: TextSetup, phi: str) -> ReLUFormerConfig:
    config = setup.reluformer().config.model
    return config if phi == RELUFORMER else replace(config, phi=phi, learned_gain=None, gamma=1.0)


def _paint(ratio: Mapping[str, Interval]) -> Any:
    picture, (axis,) = sheet(1, height=2.6)
    if not ratio:
        nothing_yet(axis)
        return picture
    for place, (name, interval) in enumerate(ratio.items()):
        colour = _colours.of(name).light
        axis.plot([interval.low, interval.high], [place] * 2, lw=1.6, color=colour)
        axis.plot(interval.mean, place, "o", ms=7, color=colour)
    axis.axvline(1, color=_colours.of("relu").light, lw=1.3, ls=(0, (5, 3)))
    axis.set_yticks(range(len(ratio)), list(ratio))
    axis.invert_yaxis()
    axis.set_xlabel("time relative to ReLUFormer")
    return picture
