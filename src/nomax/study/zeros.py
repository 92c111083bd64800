"""How sparse does ReLU attention become in training, what do more zeros cost, and can they be skipped for speed?

    nomax data get fashion-mnist help-de-en
    nomax study zeros                  an hour and a half on one core
    nomax study zeros --setup hour     models of the same size, trained longer

Language models and vision transformers that differ in their attention alone: shifts of the scores before h, fixed and
learned ones; thresholds β·√(2 log L); and an L1 penalty of the weights, which rises to λ in training. Shown are their
loss or error beside the share of their weights that are exactly zero, and blocks of a long cache: keys of a layer over
many documents of the training text, one after the other, with queries of the test text. relu(s + shift) is zero for a
whole block if an upper bound on its scores is not above −shift. How many blocks are all zero, how many of them the
bounds can tell, and the time of bounds and of attention over the blocks that are left: nomax.study.engine.blocks.
Options change the text models; images keep to the set-up of the same name. What came out: results/zeros/verdicts.md.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from nomax import _figures
from nomax._figures import PAPER
from nomax.phi import SOFTMAX
from nomax.study.engine.blocks import BOUNDS, ORDERS, SIZES
from nomax.study.engine.experiment import ImageExperiment, TextExperiment, TrainedExperiment
from nomax.study.engine.figure import Figure, Table, handle, legend, nothing_yet, percent_axis, sheet
from nomax.study.engine.result import ImageResult, Result, TrainedResult
from nomax.study.engine.statistics import Comparison, Interval, accuracy, comparison, contrast
from nomax.study.engine.verdict import MARGIN as POINT
from nomax.study.engine.verdict import Outcome, Premise, Verdict, above, learned, plain, settle, spread, worst
from nomax.study.engine.verdict import scale as image_scale
from nomax.study.images.over_alpha import bar
from nomax.study.images.setup import SETUPS as IMAGES
from nomax.study.images.setup import Setup
from nomax.study.text.phi import predicts
from nomax.study.text.setup import TextSetup
from nomax.study.text.shared import MARGIN, loss
from nomax.study.text.shared import scale as text_scale

TITLE = "How sparse does ReLU attention become, and can its zeros be skipped?"
CLAIMS = ("Q-zeros", "Q-sparse")
KIND = "text"

_DATA = {"data": "help-de-en"}
CHANGES = {"default": {**_DATA, "steps": 1200, "warmup": 60}, "hour": _DATA}
# Beside the set-up of images of the same name: data that learns enough, and one precision for all machines.
OF_IMAGES: Mapping[str, Mapping[str, Any]] = {
    "default": {"data": "fashion-mnist", "precision": "fp32", "steps": 1000, "warmup": 100}
}
PATCH = 4

WORTH = 5  # margins of loss by which attention must help, so that to lose one is not to lose much of it
MANY = 0.9  # "nine in ten"
PAYS = 1.3  # a gain in time worth a kernel and a cache of its own
LEAST = 1e-4  # the least share of weights that a figure tells from none
TICKS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3, 1e-3, LEAST)
SHOWN = 65_536  # keys whose blocks are shown


@dataclass(frozen=True)
class Kind:
    """A kind of attention: its φ, what else is different, and the line of a figure that it is on."""

    name: str
    line: str
    mark: str
    """What tells it from others on the line."""
    phi: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the configuration of the model."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Changes to that of the training."""
    long: bool = False
    """Whether half a million keys are looked at, too."""

    @property
    def level(self) -> bool:
        """True for those to compare with: softmax, and a model without attention."""
        return self.phi in (SOFTMAX, "0*relu/L")

    def __hash__(self) -> int:
        return hash(self.name)


BASE = Kind("relu/L", "fixed shift", "0", "relu/L", long=True)
NONE = Kind("no attention", "no attention", "", "0*relu/L")
KINDS = (
    BASE,
    Kind("relu(x-1)/L", "fixed shift", "−1", "relu(x-1)/L", long=True),
    Kind("relu(x-2)/L", "fixed shift", "−2", "relu(x-2)/L", long=True),
    Kind(SOFTMAX, SOFTMAX, "", SOFTMAX),
    NONE,
    Kind("L1 to 0.03", "L1 penalty", "0.03", "relu/L", training={"attention_l1": (0.003, 0.03)}),
    Kind("relu, β = 1", "relu, threshold", "1", "relu(x-sqrt(2 log L))"),
    Kind("learned shift", "learned shift", "", "relu/L", model={"learned_shift": "head"}),
    Kind("relu2, β = ½", "relu2, threshold", "½", "relu2(x-0.5*sqrt(2 log L))"),
    Kind("L1 to 0.1", "L1 penalty", "0.1", "relu/L", training={"attention_l1": (0.01, 0.1)}),
    Kind("relu2/L", "relu2", "", "relu2/L"),
    Kind("relu2, β = 1", "relu2, threshold", "1", "relu2(x-sqrt(2 log L))"),
)
ASKED = 5  # kinds that come first
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
Found = Mapping[Kind, Sequence[Any]]


def grid(setup: TextSetup, seeds: Sequence[int]) -> list[TrainedExperiment]:
    """Return every kind, of text and of images, seed after seed; in each, the kinds that verdicts need come first."""
    return [run for _, run in _runs(setup, seeds)]


def _runs(setup: TextSetup, seeds: Sequence[int]) -> list[tuple[Kind, TrainedExperiment]]:
    makes: tuple[Callable[..., TrainedExperiment], ...] = (_text, _image)
    parts = (KINDS[:ASKED], KINDS[ASKED:])
    return [(kind, make(setup, kind, seed)) for seed in seeds for part in parts for make in makes for kind in part]


def _text(setup: TextSetup, kind: Kind, seed: int) -> TextExperiment:
    long = kind.long and setup.name != "smoke"
    looks = () if kind.level else ("blocks", "long-blocks") if long else ("blocks",)
    run = setup.run(kind.phi, task="language", documents=setup.text_length, seed=seed, measures=("rows", *looks))
    return replace(run, config=_changed(run.config, kind))


def _image(setup: TextSetup, kind: Kind, seed: int) -> ImageExperiment:
    of_images = _of_images(setup)
    patch = PATCH if PATCH in of_images.patches else min(of_images.patches)
    run = of_images.run(kind.phi, patch=patch, seed=seed)
    measures = ("rows",) if kind.level else ("rows", "blocks")
    return replace(run, config=_changed(run.config, kind), measures=measures)


def _of_images(setup: TextSetup) -> Setup:
    return replace(IMAGES[setup.name], device=setup.device, **OF_IMAGES.get(setup.name, {}))


def _changed(config: Any, kind: Kind) -> Any:
    return replace(config, model=replace(config.model, **kind.model), **kind.training)


def by_kind(results: Sequence[Result], setup: TextSetup) -> tuple[Found, Found]:
    """Return the results of text and of images by kind, in the order of the kinds."""
    kinds = {run.key: kind for kind, run in _runs(setup, setup.seeds)}
    both: tuple[dict[Kind, list[Any]], dict[Kind, list[Any]]] = ({}, {})
    for result in sorted(results, key=lambda result: KINDS.index(kinds.get(result.key, BASE))):
        if result.key in kinds:
            both[isinstance(result, ImageResult)].setdefault(kinds[result.key], []).append(result)
    return both


def figures(results: Sequence[Result], setup: TextSetup) -> list[Figure]:
    """Draw loss against zeros, the blocks that could be skipped, and what skipping gains."""
    text, images = by_kind(results, setup)
    return [_frontier(text, images), _blocks(text, images), _speed(text)]


def verdicts(results: Sequence[Result], setup: TextSetup) -> list[Verdict]:
    """Judge whether zeros are free, and whether skipping them pays."""
    text, images = by_kind(results, setup)
    return [_free(text, images, setup), _pays(text)]


# Scores of a result; None where the run did not get there.


def error(result: ImageResult) -> float | None:
    """Return the share of test images that are wrong."""
    right = accuracy(result)
    return None if right is None else 1 - right


def measured(name: str) -> Callable[[TrainedResult], float | None]:
    """Return a score: what was measured under this name."""
    return lambda result: getattr(result, "measured", {}).get(name)


def gain(order: str, keys: int, left: str = "left") -> Callable[[TrainedResult], float | None]:
    """Return a score: the time over all keys, divided by that of the bound and of attention over what it leaves.

    left: "left" if these blocks lie together, "copied" if they are copied together first.
    """

    def score(result: TrainedResult) -> float | None:
        names = ("dense_seconds", f"{order} bound_seconds", f"{order} {left}_seconds")
        dense, bound, rest = (measured(f"{name} {keys}")(result) for name in names)
        return None if dense is None or bound is None or rest is None else dense / (bound + rest)

    return score


def _values(results: Sequence[Any], score: Callable[[Any], float | None]) -> list[float]:
    return [value for result in results if (value := score(result)) is not None]


def _mean(results: Sequence[Any], score: Callable[[Any], float | None]) -> float | None:
    values = _values(results, score)
    return fmean(values) if values else None


def _lengths(found: Found) -> list[int]:
    """Return the numbers of keys whose blocks were looked at."""
    names = {name for results in found.values() for result in results for name in result.measured}
    return sorted(int(name.split()[1]) for name in names if name.startswith("dense_seconds "))


def _as_good(found: Found, score: Callable[[Any], float | None], margin: float) -> Found:
    """Return the kinds whose mean loss or error is at most a margin above that of relu/L."""
    base = _mean(found.get(BASE, ()), score)
    if base is None:
        return {}
    means = {kind: _mean(results, score) for kind, results in found.items() if not kind.level}
    return {kind: found[kind] for kind, mean in means.items() if mean is not None and mean <= base + margin}


# Verdicts


def _free(text: Found, images: Found, setup: TextSetup) -> Verdict:
    """Judge whether nine in ten weights can be zero at no cost."""
    shares: dict[str, Interval] = {}
    noise: dict[str, Comparison | None] = {}
    words: list[str] = []
    sides: tuple[tuple[str, Found, Any, float, str], ...] = (
        ("text", text, loss, MARGIN, f"{MARGIN:g} nats"),
        ("images", images, error, POINT, f"{100 * POINT:g} point of accuracy"),
    )
    for name, found, score, margin, said in sides:
        good = _as_good(found, score, margin)
        means = {kind: mean for kind, some in good.items() if (mean := _mean(some, measured("zeros"))) is not None}
        if not means:
            shares[name] = Interval(math.nan, math.nan, math.nan)
            continue
        best = max(means, key=lambda kind: means[kind])
        values = _values(good[best], measured("zeros"))
        shares[name] = contrast([values])
        noise[f"the zeros of {name}"] = comparison({best: values}, [MANY], margin=POINT, unit="of the weights")
        base = _mean(found[BASE], measured("zeros"))
        words.append(
            f"of {name}, {best.name} has {spread(shares[name])} of its weights zero, the most of {len(good)} of "
            f"{len(found)} kinds that are at most {said} behind relu/L, which has {base:.3f}"
        )
    sentence = (
        f"On test data: {'; '.join(words)}. Reproduced if the intervals of text and images are above {MANY:g}, "
        "contradicted if one is below."
    )
    outcome = worst([above(share, MANY) for share in shares.values()])
    return _judged("Q-zeros", outcome, sentence, text, images, dict(shares), noise, setup)


def _pays(text: Found) -> Verdict:
    """Judge whether skipping is faster, by the best of all kinds, orders and lengths: a choice that favours it."""
    good = _as_good(text, loss, MARGIN)
    gains = {
        (kind, order, keys): mean
        for kind, results in good.items()
        for order in ORDERS
        for keys in _lengths(text)
        if (mean := _mean(results, gain(order, keys))) is not None
    }
    if not gains:
        sentence = "No time has been measured yet: nothing to judge."
        return Verdict("Q-sparse", "undecided", sentence, text_scale([]), [], {})
    kind, order, keys = max(gains, key=lambda place: gains[place])
    together = _values(good[kind], gain(order, keys))
    best, noise = contrast([together]), comparison({kind: together}, [PAYS], margin=PAYS - 1, unit="times")
    zeros, none = (_mean(good[kind], measured(f"{name} {keys}")) for name in ("cache_zeros", f"{order} 16 zero"))
    told = max(_mean(good[kind], measured(f"{order} {size} {bound} {keys}")) or 0 for size in SIZES for bound in BOUNDS)
    copied = contrast([_values(good[kind], gain(order, keys, "copied"))])
    sentence = (
        f"Of the {len(good)} kinds whose loss is at most {MARGIN:g} nats above that of relu/L, {kind.name} gains the "
        f"most: attention of one query over {keys:,} keys ({order} order) takes {spread(best, 2)} times as long as a "
        f"bound and attention over the blocks it leaves if they lie together, and {spread(copied, 2)} times if they "
        f"are copied together first. There {zeros or 0:.1%} of the weights are zero, {none or 0:.1%} of the blocks of "
        f"16 keys are all zero, and a bound tells at most {told:.1%} of blocks. Sorting the keys is not counted. To "
        f"pay is to be {PAYS:g} times as fast: reproduced if the interval with copying is above, contradicted if that "
        "without is below."
    )
    by_place = {f"{kind.name}, {order}, {keys:,} keys": round(mean, 3) for (kind, order, keys), mean in gains.items()}
    numbers = {"together": best, "copied": copied, "gains": by_place}
    outcome: Outcome = "reproduced" if above(copied, PAYS) == "reproduced" else "undecided"
    if above(best, PAYS) == "contradicted":
        outcome = "contradicted"
    return _judged("Q-sparse", outcome, sentence, text, {}, numbers, {"the gain": noise})


def _judged(
    claim: str,
    outcome: Outcome,
    sentence: str,
    text: Found,
    images: Found,
    numbers: Mapping[str, Any],
    comparisons: Mapping[str, Comparison | None],
    setup: TextSetup | None = None,
) -> Verdict:
    of_text, of_images = ([result for some in found.values() for result in some] for found in (text, images))
    premises = [predicts(of_text), matters(text), *([_classifies(of_images)] if setup else [])]
    scales = [text_scale(of_text), *([image_scale(of_images, _of_images(setup).image_size)] if setup else [])]
    if any(number.mean != number.mean for number in numbers.values() if isinstance(number, Interval)):
        outcome, sentence, numbers = "undecided", "The runs that this compares are not all there: nothing to judge.", {}
    both = [*of_text, *of_images]
    scale = "; ".join(scales)
    said: dict[str, Any] = {"scale": scale, "numbers": plain(numbers), "premises": premises, "comparisons": comparisons}
    return settle(claim, outcome, sentence, results=both, **said)


def matters(text: Found) -> Premise:
    """State that attention is worth so much to the language model that a margin of loss says something about it."""
    with_it, without = (_mean(text.get(kind, ()), loss) for kind in (BASE, NONE))
    if with_it is None or without is None:
        return Premise("no model without attention has been run", False, "Run relu/L and no attention.")
    worth, bar = without - with_it, WORTH * MARGIN
    words = f"without attention the loss is {worth:.3f} nats higher than with relu/L"
    remedy = "Train longer, until attention is worth more."
    if worth < bar:
        return Premise(f"{words}, less than {bar:g}: its zeros cost little because it does little", False, remedy)
    return Premise(f"{words}, at least {bar:g}", True)


def _classifies(results: Sequence[ImageResult]) -> Premise:
    softmax = [result for result in results if result.activation == SOFTMAX]
    return learned(softmax, accuracy, bar(softmax[0].data) if softmax else 0.0, "data")


# Figures


def _frontier(text: Found, images: Found) -> Figure:
    panels: tuple[tuple[str, Found, Any], ...] = (("text", text, loss), ("images", images, error))
    columns = ("data", "kind", "weights that are zero", "loss or error", "lowest", "highest", "empty rows", "seeds")
    rows = tuple(
        (
            name,
            kind.name,
            _rounded(_mean(results, measured("zeros"))),
            *(_rounded(function(_values(results, score))) for function in (fmean, min, max)),
            _rounded(_mean(results, measured("empty_rows"))),
            len(results),
        )
        for name, found, score in panels
        for kind, results in found.items()
        if _values(results, score)
    )
    words = "; ".join(f"{row[1]} of {row[0]}: {row[3]:.4g} with {row[2]} zeros" for row in rows if row[2] is not None)
    caption = (
        "Left: the test loss in nats of a language model; right: the test error of a vision transformer; over the "
        "share of weights that are not zero, fewer to the right. Broken lines: softmax, and a model without attention. "
        "Beside a point is its shift, its β or its λ. Means over seeds, bars from lowest to highest. A share below "
        f"{LEAST:g} is drawn there. {_models(text, images)}"
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
        shown = {kind: results for kind, results in found.items() if _values(results, score)}
        if not shown:
            nothing_yet(axis)
            continue
        for line in dict.fromkeys(kind.line for kind in shown):
            lines[line] = None
            _draw_line(axis, line, {kind: some for kind, some in shown.items() if kind.line == line}, score)
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


def _draw_line(axis: Any, line: str, found: Found, score: Callable[[Any], float | None]) -> None:
    look, places, means = _look(line), [], []
    if all(kind.level for kind in found):
        for results in found.values():
            axis.axhline(fmean(_values(results, score)), color=look["color"], ls=look["ls"], lw=look["lw"])
        return
    for kind, results in found.items():
        values = _values(results, score)
        places.append(max(LEAST, 1 - (_mean(results, measured("zeros")) or 0)))
        means.append(fmean(values))
        axis.plot([places[-1]] * 2, [min(values), max(values)], lw=1.6, color=look["color"], alpha=0.5)
        axis.annotate(kind.mark, (places[-1], means[-1]), (6, 5), textcoords="offset points", fontsize=9.5)
    axis.plot(places, means, **look)


def _blocks(text: Found, images: Found) -> Figure:
    shown = {name: (found, keys) for name, found in (("text", text), ("images", images)) if (keys := _shown(found))}
    parts = [(size, part) for size in SIZES for part in ("zero", *BOUNDS)]
    columns = ("data", "keys", "kind", "order", "zeros", *(f"{size} {part}" for size, part in parts))
    rows = tuple(
        (
            name,
            keys,
            kind.name,
            order,
            _rounded(_mean(results, measured(f"cache_zeros {keys}"))),
            *(_rounded(_mean(results, measured(f"{order} {size} {part} {keys}"))) for size, part in parts),
        )
        for name, (found, keys) in shown.items()
        for kind, results in found.items()
        if _values(results, measured(f"cache_zeros {keys}"))
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
    return max((keys for keys in _lengths(found) if keys <= SHOWN), default=0)


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
            told = [_mean(found.get(kind, ()), measured(f"halved 16 {bound} {keys}")) for bound in BOUNDS]
            values = (
                _mean(found.get(kind, ()), measured(f"cache_zeros {keys}")),
                _mean(found.get(kind, ()), measured(f"halved 16 zero {keys}")),
                _mean(found.get(kind, ()), measured(f"halved 256 zero {keys}")),
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


def _speed(text: Found) -> Figure:
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
            " ".join(f"{value:g}" for value in dict.fromkeys(_values(results, measured(f"{order} size {keys}")))),
            " ".join(
                "box" if value else "ball" for value in dict.fromkeys(_values(results, measured(f"{order} box {keys}")))
            ),
            *(
                _rounded(1e3 * (_mean(results, measured(f"{name} {keys}")) or math.nan))
                for name in (
                    "dense_seconds",
                    f"{order} bound_seconds",
                    f"{order} left_seconds",
                    f"{order} copied_seconds",
                )
            ),
            *(_rounded(_mean(results, gain(order, keys, left))) for left in ("left", "copied")),
        )
        for kind, results in text.items()
        for keys in _lengths(text)
        for order in ORDERS
        if _values(results, gain(order, keys))
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
    lengths = _lengths(text)
    drawn = 0
    for kind, results in text.items():
        line = {
            keys: max(gains)
            for keys in lengths
            if (gains := [mean for order in ORDERS if (mean := _mean(results, gain(order, keys))) is not None])
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
