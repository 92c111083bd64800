"""A verdict needs its premise, and one that is undecided says what would decide it."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from toy_study import result

from nomax.study.claims import CLAIMS, GROUPS, HEADLINE
from nomax.study.engine.result import Result, finals, trials
from nomax.study.engine.statistics import Comparison, Interval, accuracy, comparison, contrast, over_settings, pooled
from nomax.study.engine.verdict import Premise, Verdict, above, agree, difference, learned, settle, would_decide


def softmax(**accuracies: float) -> list[Result]:
    """A baseline of two seeds by variant."""
    return [
        result(f"{number:015}{seed}", phi="softmax", activation="softmax", variant=name, accuracy=value, seed=seed)
        for number, (name, value) in enumerate(accuracies.items())
        for seed in (0, 1)
    ]


def test_every_claim_says_where_it_belongs_what_the_paper_has_and_what_must_hold() -> None:
    for claim in CLAIMS.values():
        assert claim.group in GROUPS
        assert claim.paper
        assert claim.premise
    assert set(HEADLINE) <= set(CLAIMS)
    assert {claim.group for claim in CLAIMS.values()} == set(GROUPS)


def test_a_baseline_has_learned_if_its_mean_reaches_the_bar_in_every_cell() -> None:
    results = softmax(small=0.8, large=0.9)
    assert learned(results, accuracy, 0.8, "variant") == Premise(
        "softmax has learned: at least 80.0 % everywhere, and the bar is 80.0 %", True
    )
    below = learned(results, accuracy, 0.85, "variant")
    assert not below.holds
    assert below.sentence == "softmax has not learned enough: 80.0 % at small, below the bar of 85.0 %"
    assert "Train longer" in below.remedy
    assert learned(results, accuracy, 0.85, "variant", compared=["large"]).holds
    absent = learned(results, accuracy, 0.5, "variant", compared=["huge", "large"])
    assert (absent.holds, absent.sentence) == (False, "softmax has not been run at huge")
    assert not learned([], accuracy, 0.5, "variant").holds
    lost = [replace(result, status="diverged", accuracy=None) for result in results]  # counts as chance
    assert not learned(lost, accuracy, 0.5, "variant").holds


@pytest.mark.parametrize(
    ("loss", "bleu", "holds"),
    [
        (Interval(1, 0.5, 1.5), Interval(1, 0.5, 1.5), True),
        (Interval(1, 0.5, 1.5), Interval(-1, -1.5, -0.5), False),
        (Interval(1, 0.5, 1.5), Interval(-1, -2.5, 0.5), True),
        (Interval(1, 0.5, 1.5), Interval(-1, math.nan, math.nan), True),
    ],
)
def test_metrics_disagree_if_their_intervals_lie_on_opposite_sides(loss: Interval, bleu: Interval, holds: bool) -> None:
    premise = agree({"loss": loss, "BLEU": bleu})
    assert premise.holds == holds
    if not holds:
        assert premise.sentence == "loss says more than 0 ([+0.5, +1.5]), but BLEU says less than 0 ([−1.5, −0.5])"


def test_an_unmet_premise_leaves_nothing_decided_and_the_sentence_begins_with_it() -> None:
    results = softmax(small=0.6)
    premises = [Premise("softmax reaches 60.0 %, below the bar of 80.0 %", False, "Train longer."), Premise("x", True)]
    words = {"results": results, "scale": "small", "numbers": {"gain": Interval(0.1, 0.05, 0.15)}}
    verdict = settle("W-h", "reproduced", "The gain is 10 points.", premises=premises, **words)
    assert verdict.verdict == "undecided"
    assert verdict.sentence == (
        "Nothing can be decided: softmax reaches 60.0 %, below the bar of 80.0 %. The gain is 10 points."
    )
    assert verdict.needed == "Train longer."
    assert json.loads(json.dumps(asdict(verdict)))["premises"][1] == {"sentence": "x", "holds": True, "remedy": ""}
    assert verdict.numbers == {"gain": [0.1, 0.05, 0.15]}
    twice = [Premise(f"it is low: {value} %", False) for value in (60, 70)]
    assert settle("W-h", "reproduced", "So.", premises=twice, **words).sentence == (
        "Nothing can be decided: it is low: 60 %; 70 %. So."
    )
    decided = settle("W-h", "reproduced", "The gain is 10 points.", premises=premises[1:], **words)
    assert (decided.verdict, decided.needed, decided.seeds) == ("reproduced", "", [0, 1])


def test_a_verdict_of_an_earlier_version_is_still_one() -> None:
    assert Verdict("W-h", "undecided", "", "", [], {}).premises == []


def test_rows_of_before_are_of_the_test_split_and_trials_are_told_apart() -> None:
    plain = result().to_dict()
    del plain["held_out"]
    old, trial = Result.from_dict(plain), result("1" * 16, held_out=0.1)
    assert old.held_out == 0
    assert trial.label == "relu/L, mu/8, trial at 0.001, seed 0"
    assert (finals([old, trial]), trials([old, trial])) == ([old], [trial])


def drawn(generator: np.random.Generator, mean: float, seeds: int, settings: int) -> dict[int, list[float]]:
    return {n: list(mean + 0.02 * generator.standard_normal(seeds)) for n in range(settings)}


@pytest.mark.parametrize(("settings", "seeds"), [(1, 4), (3, 3), (6, 2)])
def test_the_half_width_is_that_of_the_intervals_of_so_many_seeds(settings: int, seeds: int) -> None:
    generator = np.random.default_rng(0)
    true = Comparison(0.0, 0.02 / math.sqrt(settings), settings, seeds, (0.0,), 0.01)
    found = [pooled(drawn(generator, 0.0, seeds, settings)) for _ in range(400)]
    width = np.mean([(interval.high - interval.low) / 2 for interval in found])
    # What is planned with errs to the safe side: the standard deviation of four values is 8 % too low in the mean, and
    # the ends of a bootstrap of so few are nearer than those of a normal distribution.
    assert 0.85 * true.half_width(seeds) < width < true.half_width(seeds)


@pytest.mark.parametrize(("mean", "settings"), [(0.02, 1), (0.01, 3), (0.015, 6)])
def test_the_seeds_that_would_decide_do_so_four_times_in_five(mean: float, settings: int) -> None:
    generator = np.random.default_rng(1)
    seeds = Comparison(mean, 0.02 / math.sqrt(settings), settings, 2, (0.0,), 0.01).seeds_for(mean, surely=True)
    assert seeds is not None
    rounds = [above(pooled(drawn(generator, mean, seeds, settings)), 0) for _ in range(400)]
    assert 0.72 < rounds.count("reproduced") / 400 < 0.92
    assert [above(pooled(drawn(generator, 0.0, seeds, settings)), 0) for _ in range(400)].count("undecided") > 360


def test_a_comparison_is_that_of_the_interval_it_stands_for() -> None:
    cells = {"a": [0.1, 0.3], "b": [0.2, 0.3, 0.4], "c": [9.0]}
    found = comparison(cells, [0], margin=0.01)
    assert found is not None
    assert found.mean == pytest.approx(pooled(cells).mean)  # without c, which has one seed
    assert (found.settings, found.seeds) == (2, 2)
    growth = comparison({"a": cells["a"], "b": cells["b"]}, [0], margin=0.01, weights=[-1, 1])
    assert growth is not None
    assert growth.mean == pytest.approx(contrast([cells["a"], cells["b"]], [-1, 1]).mean)
    assert growth.deviation == pytest.approx(math.sqrt(0.02 + 0.01))
    settings = comparison(cells, [0], margin=0.01, over="settings")
    assert settings is not None
    assert (settings.settings, settings.seeds) == (1, 2)
    assert settings.mean == pytest.approx(over_settings({name: cells[name] for name in "ab"}).mean)
    assert comparison({"c": [9.0]}, [0], margin=0.01) is None


HOUR = [replace(each, core_seconds=1800.0) for each in softmax(a=0.8, b=0.8)]  # half an hour a run, an hour a seed


def test_an_undecided_verdict_names_the_seeds_and_the_hours_that_would_decide_it() -> None:
    gain = Comparison(0.012, 0.01, 2, 2, (0.0,), 0.01)
    assert would_decide({"the gain": gain}, HOUR) == (
        "If the gain stays at +1.20 points, about 7 seeds, 5 more (5.0 core-hours), would put its interval clear of 0 "
        "four times in five."
    )
    assert gain.seeds_for(0.012, surely=True) == 7


def test_a_mean_within_the_noise_says_how_narrow_it_is_and_could_be() -> None:
    gain = Comparison(-0.001, 0.01, 2, 2, (0.0,), 0.005)
    assert would_decide({"the gain": gain}, HOUR) == (
        "2 seeds give the gain to within ±3.04 points, and its mean lies within that noise: about 17 seeds, 15 more "
        "(15.0 core-hours), would give it to within ±0.50 points."
    )
    loss = replace(gain, margin=0.00001, unit="nats")
    assert "more than 1,000 seeds, would give it to within ±0.000 nats" in would_decide({"the gain": loss}, HOUR)
    close = replace(gain, deviation=0.002, margin=0.01)
    assert would_decide({"the gain": close}, HOUR).endswith("already less than 1.00 points: too close to call.")


def test_the_comparison_that_needs_most_is_the_one_that_is_told() -> None:
    easy, hard = Comparison(0.02, 0.01, 2, 2, (0.0,), 0.01), Comparison(0.012, 0.01, 2, 2, (0.0,), 0.01)
    assert would_decide({"one": easy, "other": hard}, HOUR).startswith("If other stays")
    assert would_decide({"clear": Comparison(1.0, 0.01, 2, 2, (0.0,), 0.01)}, HOUR) == ""
    alone = [result for result in HOUR if result.seed == 0]
    assert would_decide({}, alone) == "A second seed of every setting (1.0 core-hours) would give an interval."
    verdict = settle(
        "W-h", "undecided", "Who knows.", results=HOUR, scale="", numbers={}, comparisons={"one": hard, "two": None}
    )
    assert verdict.needed.startswith("If one stays")
    assert list(verdict.comparisons) == ["one"]


@pytest.mark.parametrize(
    ("interval", "unit", "text"),
    [
        (Interval(-0.165, -0.21, -0.12), "nats", "lower by 0.165 nats [0.120, 0.210]"),
        (Interval(0.165, -0.02, 0.35), "nats", "higher by 0.165 nats [−0.020, 0.350]"),
        (Interval(-0.004, -0.012, 0.003), "points", "lower by 0.40 points [−0.30, 1.20]"),
        (Interval(0.5, math.nan, math.nan), "BLEU", "higher by 0.500 BLEU (no interval: fewer than two pairs of runs)"),
    ],
)
def test_a_signed_difference_is_said_without_a_sign(interval: Interval, unit: str, text: str) -> None:
    assert difference(interval, unit) == text
