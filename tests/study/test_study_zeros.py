"""The study of zeros: its grid of texts and images, its verdicts at made-up results, and its figures."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from made_results import noise

from nomax import data, study
from nomax.console import Console
from nomax.data.registry import TEXTS
from nomax.study.engine.blocks import BOUNDS, ORDERS, SIZES
from nomax.study.engine.experiment import ImageExperiment, TextExperiment
from nomax.study.engine.publish import to_csv
from nomax.study.engine.result import ImageResult, Result, TextResult
from nomax.study.engine.store import Store
from nomax.study.engine.worker import run_to_outcome
from nomax.study.images import setup as images
from nomax.study.text.setup import SETUPS
from nomax.study.zeros import study as zeros
from nomax.study.zeros.kinds import ASKED, KINDS, by_kind, every_run, gain, lengths_of
from nomax.train.console import Stop

# The smoke set-up of images needs no data that must be fetched.
SETUP = replace(SETUPS["smoke"], data="help-de-en", seeds=(0, 1))
KEYS = 8192


def made(
    share: Callable[[str], float],
    cost: Callable[[str], float] = lambda name: 0.0,
    gain: Callable[[str], float] = lambda name: 1.0,
    copied: float = 5.0,
    spread: float = 1e-4,
    worth: float = 0.3,
    worth_of_images: float | None = None,
) -> list[Result]:
    """A result for every run: zeros, loss above relu/L's 3 nats, and gain in time by the name of its kind.

    copied: how many times as long what is left takes if it is copied together first.
    worth: how much worse models are without attention.
    """
    results: list[Result] = []
    for kind, run in every_run(SETUP, SETUP.seeds):
        bare = run.result("done", loss=1.0)
        off = noise(bare, spread)
        found = {"zeros": share(kind.name) + off, "empty_rows": 0.0}
        if "blocks" in run.measures:
            found |= {f"cache_zeros {KEYS}": share(kind.name), f"dense_seconds {KEYS}": 0.01}
            for order in ORDERS:
                found |= {f"{order} {size} {part} {KEYS}": 0.1 for size in SIZES for part in ("zero", "box", "ball")}
                left = 0.01 / (gain(kind.name) + off) - 0.001
                times = {"bound": 0.001, "left": left, "copied": copied * left}
                found |= {f"{order} {name}_seconds {KEYS}": value for name, value in times.items()}
                found |= {f"{order} size {KEYS}": 16.0, f"{order} box {KEYS}": 1.0}
        worse = cost(kind.name)
        if kind.name == "no attention":
            worse = worth if isinstance(run, TextExperiment) or worth_of_images is None else worth_of_images
        scores: dict[str, Any] = {"loss": 3.0 + worse + off}
        scores |= {"accuracy": 0.85 - worse + off} if isinstance(run, ImageExperiment) else {}
        results.append(run.result("done", measured=found, **scores))
    return results


def outcomes(results: list[Result]) -> dict[str, str]:
    found = zeros.verdicts(results, SETUP)
    for verdict in found:
        json.dumps(asdict(verdict), allow_nan=False)
        assert verdict.text
        assert verdict.scale
    return {verdict.claim: verdict.verdict for verdict in found}


def only(name: str, there: float, elsewhere: float) -> Callable[[str], float]:
    return lambda kind: there if kind == name else elsewhere


def test_every_kind_is_trained_on_text_and_on_images_with_every_seed() -> None:
    runs = zeros.grid(SETUP, (0, 1))
    assert len(runs) == len({run.key for run in runs}) == len(KINDS) * 2 * 2
    for kind in (TextExperiment, ImageExperiment):
        some = [run for run in runs if isinstance(run, kind)]
        assert len(some) == len(KINDS) * 2
        assert all("rows" in run.measures for run in some)
    order = [run.config.seed for run in runs]
    assert order == sorted(order)
    assert {run.config.model.phi for run in runs[:ASKED]} >= {"relu/L", "softmax"}


def test_kinds_differ_in_their_attention_and_its_penalty_alone() -> None:
    for make in (TextExperiment, ImageExperiment):
        runs = [run for run in zeros.grid(SETUP, (0,)) if isinstance(run, make)]
        plain = []
        for run in runs:
            settings = asdict(run.config)
            del settings["model"]["phi"], settings["model"]["learned_shift"], settings["attention_l1"]
            plain.append(settings)
        assert all(settings == plain[0] for settings in plain)


@pytest.mark.parametrize("name", ["default", "hour", "day", "smoke"])
def test_the_named_setups_give_runs_that_can_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = data.load("fashion-mnist-small", "train")
    monkeypatch.setattr(images, "source", lambda _: small)  # which has the size of those that must be fetched
    setup = study.named_setup(zeros, name)
    if setup.data in TEXTS:
        for run in zeros.grid(setup, (0,)):
            run.config.check()


def test_measures_of_images_are_part_of_a_run_and_none_leave_its_key_as_it_was() -> None:
    run = next(run for run in zeros.grid(SETUP, (0,)) if isinstance(run, ImageExperiment))
    assert "measures" in run.identity()
    without = replace(run, measures=())
    assert "measures" not in without.identity()
    assert without.key != run.key


SPARSE = "relu(x-1)/L"


@pytest.mark.parametrize(
    ("share", "cost", "outcome"),
    [
        (only(SPARSE, 0.95, 0.5), only(SPARSE, 0.0, 0.0), "reproduced"),
        (only(SPARSE, 0.95, 0.5), only(SPARSE, 0.03, 0.0), "contradicted"),  # it costs more than a margin
        (only(SPARSE, 0.85, 0.5), only(SPARSE, 0.0, 0.0), "contradicted"),
        (only(SPARSE, 0.9, 0.5), only(SPARSE, 0.0, 0.0), "undecided"),
    ],
)
def test_zeros_are_free_if_a_kind_as_good_as_relu_has_nine_in_ten(share: Any, cost: Any, outcome: str) -> None:
    assert outcomes(made(share, cost, spread=1e-3))["Q-zeros"] == outcome


@pytest.mark.parametrize(
    ("gain", "cost", "copied", "outcome"),
    [
        (only(SPARSE, 3.0, 1.0), only(SPARSE, 0.0, 0.0), 1.0, "reproduced"),
        (only(SPARSE, 3.0, 1.0), only(SPARSE, 0.0, 0.0), 9.0, "undecided"),  # it would pay without copying
        (only(SPARSE, 3.0, 1.0), only(SPARSE, 0.05, 0.0), 1.0, "contradicted"),  # but costs too much
        (only("softmax", 3.0, 1.1), only(SPARSE, 0.0, 0.0), 1.0, "contradicted"),
        (only(SPARSE, 1.2, 1.0), only(SPARSE, 0.0, 0.0), 1.0, "contradicted"),
    ],
)
def test_skipping_pays_if_a_kind_as_good_as_relu_gains_enough(
    gain: Any, cost: Any, copied: float, outcome: str
) -> None:
    assert outcomes(made(lambda name: 0.8, cost, gain, copied))["Q-sparse"] == outcome


def test_a_baseline_that_has_not_learned_decides_nothing() -> None:
    results = [
        replace(result, loss=6.0) if isinstance(result, TextResult) else replace(result, accuracy=0.3)  # type: ignore[type-var]
        for result in made(lambda name: 0.99, gain=lambda name: 3.0, copied=1.0)
    ]
    assert set(outcomes(results).values()) == {"undecided"}


def test_attention_that_does_little_decides_nothing() -> None:
    little, enough = (
        made(lambda name: 0.99, gain=lambda name: 3.0, copied=1.0, worth=worth, spread=1e-6) for worth in (0.09, 0.11)
    )
    assert outcomes(little) == {"Q-zeros": "undecided", "Q-sparse": "undecided"}
    assert outcomes(enough) == {"Q-zeros": "reproduced", "Q-sparse": "reproduced"}
    assert "because it does little" in zeros.verdicts(little, SETUP)[1].sentence
    idle = made(lambda name: 0.99, gain=lambda name: 3.0, copied=1.0, worth_of_images=-0.01, spread=1e-6)
    assert outcomes(idle) == {"Q-zeros": "undecided", "Q-sparse": "reproduced"}


def test_figures_show_both_kinds_of_data_and_describe_themselves() -> None:
    results = made(lambda name: 0.8)
    shown = {figure.name: figure for figure in zeros.figures(results, SETUP)}
    assert list(shown) == ["zeros", "zeros-blocks", "zeros-speed"]
    for figure in shown.values():
        assert b"<svg" in figure.render()
        assert figure.alternative
        assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)
    assert len(shown["zeros"].table.rows) == 2 * len(KINDS)
    relu = len(KINDS) - 2  # softmax has no zeros to skip, nor a model without attention
    assert len(shown["zeros-blocks"].table.rows) == 2 * relu * len(ORDERS)
    assert len(shown["zeros-speed"].table.rows) == relu * len(ORDERS)


def test_nothing_finished_is_no_error() -> None:
    assert outcomes([]) == {"Q-zeros": "undecided", "Q-sparse": "undecided"}
    for figure in zeros.figures([], SETUP):
        assert b"no finished run" in figure.render()


def test_results_are_sorted_by_kind_and_others_are_left_out() -> None:
    results = made(lambda name: 0.8)
    other = replace(results[0], key="0" * 16)  # type: ignore[type-var]
    text, pictures = by_kind([other, *reversed(results)], SETUP)
    assert [kind.name for kind in text] == [kind.name for kind in pictures] == [kind.name for kind in KINDS]
    assert {len(some) for some in (*text.values(), *pictures.values())} == {2}
    assert all(isinstance(result, ImageResult) for some in pictures.values() for result in some)
    header = to_csv(results).splitlines()[0].split(",")
    assert {"zeros", f"cache_zeros {KEYS}", "accuracy", "loss"} <= set(header)


@pytest.mark.slow
def test_a_run_of_images_measures_zeros_and_blocks(tmp_path: Path) -> None:
    kind, run = next((kind, run) for kind, run in every_run(SETUP, (0,)) if isinstance(run, ImageExperiment))
    store = Store(tmp_path)
    assert run_to_outcome(run, store, "nomax study zeros", Stop(), Console(quiet=True)) == 0
    result = store.outcome(run.key)
    assert isinstance(result, ImageResult)
    assert result.status == "done", result.error
    assert kind.phi == "relu/L"
    found = result.measured
    # With qk-norm, half of the scores are negative before training.
    assert 0.3 < found["zeros"] < 0.7
    assert 0.3 < found[f"cache_zeros {KEYS}"] < 0.7
    assert lengths_of({kind: [result]}) == [KEYS]
    for order in ORDERS:
        for size in SIZES:
            told = [found[f"{order} {size} {bound} {KEYS}"] for bound in BOUNDS]
            assert 0 <= max(told) <= found[f"{order} {size} zero {KEYS}"] <= found[f"cache_zeros {KEYS}"]
        assert gain(order, KEYS)(result)
