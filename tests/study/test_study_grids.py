"""The grids of the studies of images: what they hold, that they pair, and share runs; and what all studies say."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_results import SETUP, grid

from nomax import data, study
from nomax.study import STUDIES
from nomax.study.engine.result import Result
from nomax.study.engine.verdict import CLAIMS
from nomax.study.images import setup
from nomax.study.images.setup import SETUPS

SEEDS = (0, 1, 2)
SIDES = {"fashion-mnist": (28, 28), "cifar10": (32, 32, 3)}
NAMES = ("scaling", "alpha", "qk-norm", "gate")
MACHINES = "sequence-parallel"  # nothing is trained
TEXT_NAMES = ("memory", "relu-attention", "documents", "text-phi")
BOTH = "zeros"  # texts and images
TITLE_LENGTH = 70


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> setup.Setup:
    """The set-up whose data nobody has fetched: its grids need only their sizes."""
    real = setup.source

    def source(name: str) -> data.Source:
        if name not in SIDES:
            return real(name)
        images = np.zeros((10, *SIDES[name]), np.uint8)
        return data.ArraySource(images, np.arange(10), tuple(map(str, range(10))), name)

    monkeypatch.setattr(setup, "source", source)
    return SETUPS["day"]


def test_the_studies_are_the_papers_four_figures_one_of_machines_choices_they_rest_on_and_those_of_text() -> None:
    assert tuple(STUDIES) == (*NAMES, MACHINES, "rate", "text-rate", *TEXT_NAMES, BOTH)
    with pytest.raises(ValueError, match="did you mean qk-norm"):
        study.load("qknorm")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("scaling", 2 * 2 * 3 * 3),  # φ, sizes, patches, seeds
        ("alpha", (3 * 5 + 1) * 3 * 3),  # h, α, softmax, patches, seeds
        ("qk-norm", (2 * 5 * 2 + 1) * 3 * 3),
        ("gate", (2 * 5 * 2 + 1) * 3 * 3),
    ],
)
def test_a_grid_has_every_combination_once(name: str, count: int) -> None:
    runs = grid(name, SETUP, SEEDS)
    assert len(runs) == count
    assert len({run.key for run in runs}) == count
    assert Counter(run.config.seed for run in runs) == dict.fromkeys(SEEDS, count // 3)


@pytest.mark.parametrize("name", ["scaling", "qk-norm", "gate"])
def test_whole_seeds_come_one_after_the_other(name: str) -> None:
    order = [run.config.seed for run in grid(name, SETUP, SEEDS)]
    assert order == sorted(order)


def test_the_largest_questions_come_first_with_all_their_seeds(day: setup.Setup) -> None:
    runs = grid("alpha", day, SEEDS)
    asked = {"softmax", "relu/L", "relu"}
    first = [run for run in runs if run.config.model.phi in asked and run.config.data == "fashion-mnist"]
    assert first == runs[: len(first)]
    assert len(first) == 3 * 3 * 3  # φ, lengths, seeds
    order = [(run.flops, run.config.seed) for run in first]
    assert order == sorted(order)  # the cheapest length first, with all its seeds
    assert all(run.config.model.tokens == 1024 for run in runs[-6:])
    assert {run.config.seed for run in runs[-6:]} == {0, 1}


def test_a_day_has_a_grid_of_its_own_for_every_length(day: setup.Setup) -> None:
    runs = grid("alpha", day, (0,))
    counts = Counter((run.config.data, run.config.model.tokens) for run in runs)
    every_h = 1 + 7 * 4 + 1  # softmax, seven h with four α, and relu with α = 2
    assert counts == {
        ("fashion-mnist", 49): every_h,
        ("fashion-mnist", 16): every_h,
        ("fashion-mnist", 196): 1 + 5 + 2 + 2,
        ("cifar10", 64): 4,
        ("cifar10", 256): 4,
        ("cifar10", 1024): 3,
    }
    assert all(run.config.steps * run.config.batch_size >= 120_000 for run in runs if run.config.model.tokens < 1000)
    assert len(day.adapted(alphas=(0.0, 1.0)).every_length()) == 3  # what is asked for holds everywhere


def test_trials_are_judged_on_held_out_images_with_a_seed_of_their_own(day: setup.Setup) -> None:
    runs = grid("rate", day, SEEDS)
    assert len(runs) == len(day.rates) * len(day.tried)
    assert {run.config.held_out for run in runs} == {0.1}
    assert {run.config.seed for run in runs}.isdisjoint(SEEDS)
    assert {run.config.held_out for run in grid("alpha", day, (0,))} == {0.0}


def test_a_phi_with_a_best_rate_of_its_own_is_trained_with_both() -> None:
    told = dataclasses.replace(SETUP, own_rates=(("relu", 5e-4),))
    rates = [run.config.lr for run in grid("alpha", told, (0,)) if run.config.model.phi == "relu"]
    assert sorted(rates) == [5e-4] * 3 + [2e-3] * 3


@pytest.mark.parametrize("name", ["qk-norm", "gate"])
def test_runs_that_alpha_has_are_shared_with_it(name: str) -> None:
    shared = {run.key for run in grid("alpha", SETUP, (0,))} & {run.key for run in grid(name, SETUP, (0,))}
    assert len(shared) == (2 * 5 + 1) * 3  # relu and relu² at every α, and softmax, at three lengths


@pytest.mark.parametrize(("name", "field"), [("qk-norm", "qk_norm"), ("gate", "gate")])
def test_the_two_of_a_pair_differ_in_nothing_else(name: str, field: str) -> None:
    runs = [run for run in grid(name, SETUP, (0,)) if run.config.model.phi != "softmax"]
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        one, other = (dataclasses.asdict(run.config) for run in (first, second))
        assert one["model"].pop(field) != other["model"].pop(field)
        assert one == other


def test_the_sweeps_take_three_lengths_of_the_smallest_model_and_scaling_every_size() -> None:
    for name in ("alpha", "qk-norm", "gate"):
        assert {run.config.model.variant for run in grid(name, SETUP, (0,))} == {"mu/7", "mu/4", "mu/2"}
    sizes = {run.config.model.variant for run in grid("scaling", SETUP, (0,))}
    assert sizes == {f"{size}/{patch}" for size in ("mu", "pico") for patch in (7, 4, 2)}


def test_the_study_over_sizes_trains_longer_unless_told_how_long_and_with_which_patches() -> None:
    hour = study.named_setup(study.load("scaling"), "hour")
    assert {(run.config.steps, run.config.model.variant) for run in grid("scaling", hour, (0,))} == {
        (2400, f"{size}/{patch}") for size in ("mu", "pico", "nano") for patch in (14, 7, 4)
    }
    assert {run.config.steps for run in grid("alpha", SETUPS["hour"], (0,))} == {600}
    told = hour.adapted(steps=80, model=("pico/7", "mu/7"))
    runs = grid("scaling", told, (0,))
    assert {(run.config.steps, run.config.model.variant) for run in runs} == {(80, "pico/7"), (80, "mu/7")}
    larger = hour.adapted(image_size=224, model=("S",), recipe="i1k", warmup=10)
    assert {run.config.model.variant for run in grid("scaling", larger, (0,))} == {"S/32", "S/16", "S/8"}
    assert {run.config.steps for run in grid("scaling", larger, (0,))} != {2400}


def test_only_scaling_measures_transfer() -> None:
    assert all(run.probes == ("digits",) for run in grid("scaling", SETUP, (0,)))
    assert not any(run.probes for run in grid("alpha", SETUP, (0,)))


@pytest.mark.parametrize("name", [*NAMES, *TEXT_NAMES, BOTH])
def test_a_study_says_what_it_shows_how_to_run_it_and_what_came_out(name: str) -> None:
    module = study.load(name)
    text = module.__doc__ or ""
    assert f"nomax study {name}" in text
    assert "hour" in text
    assert f"results/{name}/verdicts.md" in text
    assert module.CLAIMS
    assert set(module.CLAIMS) <= set(CLAIMS)
    assert len(module.TITLE) < TITLE_LENGTH


def test_together_the_studies_judge_every_claim_once() -> None:
    judged = [claim for name in (*NAMES, MACHINES, *TEXT_NAMES, BOTH) for claim in study.load(name).CLAIMS]
    assert sorted(judged) == sorted(CLAIMS)


@pytest.mark.parametrize("setup", ["default", "smoke"])
def test_the_named_setups_give_runs_that_can_start(setup: str) -> None:
    chosen = SETUPS[setup]
    for name in NAMES:
        for run in grid(name, chosen, chosen.seeds[:1]):
            run.config.check()


def test_the_learning_rates_of_a_day_are_those_that_did_best_in_the_published_trials() -> None:
    rate = study.load("rate")
    published = json.loads((Path(__file__).parents[2] / "results" / "rate" / "runs.json").read_text())
    results = [Result.from_dict(result) for result in published]
    assert all(result.trial for result in results)
    best = rate.best_rates(rate.trials(results))
    assert {"softmax", "relu/L", "relu"} <= best.keys()
    assert SETUPS["day"].lr == best["softmax"]
    assert {phi: SETUPS["day"].own_rate(phi) for phi in best} == best
