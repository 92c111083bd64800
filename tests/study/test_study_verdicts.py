"""Each claim can come out as reproduced, contradicted or undecided, and every verdict says by which numbers."""

import dataclasses
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from made_results import SETUP, image_results, noise

from nomax import study
from nomax.study.engine.result import Result
from nomax.study.engine.statistics import chosen_elsewhere, over_settings
from nomax.study.engine.verdict import Verdict, above, points
from nomax.study.images import gate, weights
from nomax.study.images.alpha import growth_with_length
from nomax.train.console import Stop

Accuracy = Callable[[Result], float]


def judge(claim: str, name: str, results: list[Result]) -> Verdict:
    found = {verdict.claim: verdict for verdict in study.load(name).verdicts(results, SETUP)}
    assert set(found) == set(study.load(name).CLAIMS)
    for verdict in found.values():
        json.dumps(dataclasses.asdict(verdict), allow_nan=False)
        assert verdict.text
        assert verdict.scale
    return found[claim]


def peak(place: float) -> Accuracy:
    """A parabola over α; softmax a little above."""
    return lambda result: 0.82 if result.activation == "softmax" else 0.8 - 0.05 * (result.alpha - place) ** 2


def log_tenfold(result: Result) -> float:
    """0 in the middle of the sizes, −1 and 1 at a tenth and ten times the compute."""
    return math.log10(result.train_flops) - 11.3


def relu_minus_softmax(level: float, slope: float = 0.0, rise: float = 0.03) -> Accuracy:
    return lambda result: (
        0.85 + rise * log_tenfold(result) + (result.phi == "relu/L") * (level + slope * log_tenfold(result))
    )


MATCH = [
    ("reproduced", relu_minus_softmax(0.0), 0.002),
    ("reproduced", relu_minus_softmax(0.02), 0.002),
    ("contradicted", relu_minus_softmax(-0.03), 0.002),
    ("contradicted", relu_minus_softmax(0.03, -0.05), 0.001),  # ahead on average, and behind in the end
    ("reproduced", relu_minus_softmax(0.05, -0.02), 0.001),  # a lower slope, and ahead all the same
    ("undecided", relu_minus_softmax(-0.01), 0.02),
]


@pytest.mark.parametrize("claim", ["W-match", "W-transfer"])
@pytest.mark.parametrize(("outcome", "accuracy", "spread"), MATCH)
def test_scaling(claim: str, outcome: str, accuracy: Accuracy, spread: float) -> None:
    verdict = judge(claim, "scaling", image_results("scaling", accuracy, spread=spread))
    assert verdict.verdict == outcome, verdict.sentence
    assert "6 settings, 18 pairs, seeds 0, 1, 2" in verdict.sentence
    assert "mu/7" in verdict.sentence


def test_scaling_recovers_the_slopes_that_were_put_in() -> None:
    results = image_results(
        "scaling", relu_minus_softmax(0.0, -0.02), spread=0.0, time=lambda result: result.train_flops / 1e9
    )
    numbers = judge("W-match", "scaling", results).numbers
    assert numbers["slope per tenfold CPU time"] == pytest.approx({"softmax": 0.03, "relu/L": 0.01})
    assert numbers["slope difference per tenfold operations"][0] == pytest.approx(-0.02)


def test_transfer_without_probes_is_undecided_and_says_why() -> None:
    results = [
        dataclasses.replace(result, ten_shot=None) for result in image_results("scaling", relu_minus_softmax(0.0))
    ]
    verdict = judge("W-transfer", "scaling", results)
    assert verdict.verdict == "undecided"
    assert "no probes" in verdict.sentence


def test_accuracy_among_the_label_subset_is_judged_where_there_is_one() -> None:
    results = [
        dataclasses.replace(result, subset_accuracy=0.9 if result.phi == "relu/L" else 0.95)
        for result in image_results("scaling", relu_minus_softmax(0.0))
    ]
    assert judge("W-match", "scaling", results).numbers["difference"][0] == pytest.approx(-0.05)


@pytest.mark.parametrize(
    ("outcome", "accuracy", "spread"),
    [
        ("reproduced", peak(1.0), 0.002),
        ("reproduced", peak(0.7), 0.002),
        ("contradicted", peak(0.0), 0.002),
        ("contradicted", peak(2.0), 0.002),
        ("undecided", lambda result: 0.85, 0.05),
    ],
)
def test_best_alpha(outcome: str, accuracy: Accuracy, spread: float) -> None:
    verdict = judge("W-alpha", "alpha", image_results("alpha", accuracy, spread=spread))
    assert verdict.verdict == outcome, verdict.sentence
    assert "of 9 pairs of h and L" in verdict.sentence
    assert verdict.numbers["by chance"] == pytest.approx(0.6)
    assert len(verdict.numbers["best"]) == 9


@pytest.mark.parametrize(
    ("outcome", "lead", "spread"),
    [
        ("reproduced", 0.0, 0.002),
        ("reproduced", 0.005, 0.001),
        ("contradicted", 0.03, 0.002),
        ("undecided", 0.01, 0.01),
    ],
)
def test_no_h_wins(outcome: str, lead: float, spread: float) -> None:
    results = image_results("alpha", lambda result: 0.85 + lead * (result.activation == "relu2"), spread=spread)
    verdict = judge("W-h", "alpha", results)
    assert verdict.verdict == outcome, verdict.sentence
    if lead > 0.02:
        assert "the best is relu2" in verdict.sentence


def test_two_names_of_nearly_one_function_are_one_winner() -> None:
    setup = dataclasses.replace(SETUP, activations=("relu", "relu6", "gelu", "identity"))
    results = image_results(
        "alpha", lambda result: 0.85 if result.activation.startswith(("relu", "softmax")) else 0.6, setup=setup
    )
    verdict = judge("W-h", "alpha", results)
    assert verdict.verdict == "contradicted"
    assert "the next of another kind " in verdict.sentence


def test_a_verdict_without_an_interval_says_of_what_there_is_too_little() -> None:
    """Two seeds of one setting: W-alpha's interval is over settings."""
    results = [result for result in image_results("alpha", peak(1)) if result.activation in ("relu", "softmax")]
    shortest = min(result.tokens for result in results)
    results = [result for result in results if result.tokens == shortest and result.seed < 2]
    sentence = judge("W-alpha", "alpha", results).sentence
    assert "(no interval: fewer than two settings) (1 setting, 2 pairs, seeds 0, 1; the interval is" in sentence
    one_seed = judge(
        "W-identity", "alpha", [result for result in image_results("alpha", peak(1)) if result.seed == 0]
    ).sentence
    assert "(no interval: fewer than two pairs of runs)" in one_seed
    cells = {("relu", 16): [0.1, 0.2], ("gelu", 64): [0.1, 0.2]}
    assert "fewer than two lengths of one h" in points(growth_with_length(cells, {16: "a", 64: "a"}))


def test_noise_alone_does_not_decide_where_the_best_alpha_is() -> None:
    """The largest of several noisy values is no estimate: 21 flat curves of three seeds, two hundred times."""
    generator = np.random.default_rng(1)
    decided = 0
    for _ in range(200):
        curves = 0.02 * generator.standard_normal((21, 3, 5))
        cells = {h: chosen_elsewhere(list(curve), [False, True, True, True, False]) for h, curve in enumerate(curves)}
        decided += above(over_settings(cells), 0) != "undecided"
    assert decided <= 20


def drop(level: float, growth: float) -> Accuracy:
    """α = 0 costs `level` at L = 49, and `growth` more for each fourfold of L."""
    return lambda result: 0.8 - (result.alpha == 0) * (level + growth * math.log(result.tokens / 49, 4))


@pytest.mark.parametrize(
    ("outcome", "accuracy", "spread"),
    [
        ("reproduced", drop(0.05, 0.03), 0.002),
        ("contradicted", drop(-0.05, 0.0), 0.002),
        ("reproduced", drop(0.05, -0.03), 0.002),  # less for longer sequences: told beside, and no part of the claim
        ("undecided", drop(0.0, 0.0), 0.01),
    ],
)
def test_degrades_without_length_scaling(outcome: str, accuracy: Accuracy, spread: float) -> None:
    verdict = judge("W-degrade", "alpha", image_results("alpha", accuracy, spread=spread))
    assert verdict.verdict == outcome, verdict.sentence


@pytest.mark.parametrize(
    ("outcome", "gain", "spread"),
    [("reproduced", 0.03, 0.002), ("contradicted", -0.03, 0.002), ("undecided", 0.0, 0.02)],
)
def test_identity(outcome: str, gain: float, spread: float) -> None:
    results = image_results("alpha", lambda result: 0.85 - gain * (result.activation == "identity"), spread=spread)
    verdict = judge("W-identity", "alpha", results)
    assert verdict.verdict == outcome, verdict.sentence


@pytest.mark.parametrize(
    ("outcome", "power", "spread"),
    [("reproduced", 1.0, 0.02), ("contradicted", 0.5, 0.02), ("undecided", 0.9, 0.5)],
)
def test_the_mean_weight_at_initialisation(outcome: str, power: float, spread: float) -> None:
    result = image_results("alpha", lambda result: 0.5)[0]
    starts = tuple(
        weights.Start("relu", 1.0, n, seed, 0.4 * n**-power * math.exp(noise(result, spread, f"{n} {seed}")))
        for n in (4, 16, 49, 196)
        for seed in weights.SEEDS
    )
    verdict = weights.initial_verdict(starts, SETUP)
    assert verdict.verdict == outcome, verdict.sentence


def test_the_mean_weight_of_real_untrained_models() -> None:
    """Softmax has exactly 1/L, relu/L about E[relu] / L, and identity about nothing."""
    runs = weights.measurements(SETUP)
    found = weights.collect([run.result("done", numbers=run.measure(Stop())) for run in runs])
    softmax = weights.sums(found, "softmax", 0.0)
    assert list(softmax) == [4, 16, 49, 196]
    assert list(softmax.values()) == pytest.approx([1, 1, 1, 1])
    for tokens, value in weights.sums(found, "relu").items():
        assert value == pytest.approx(1 / math.sqrt(2 * math.pi), abs=0.25), tokens
    assert weights.initial_verdict(found, SETUP).verdict in ("reproduced", "undecided")


def qk_norm(relu: float, relu2: float) -> Accuracy:
    return lambda result: 0.85 + result.qk_norm * (relu if result.activation == "relu" else relu2)


@pytest.mark.parametrize(
    ("outcome", "accuracy", "spread"),
    [
        ("reproduced", qk_norm(0.0, 0.0), 0.002),
        ("contradicted", qk_norm(0.04, 0.04), 0.002),
        ("contradicted", qk_norm(0.04, -0.04), 0.002),  # opposite effects do not hide in their mean
        ("undecided", qk_norm(0.01, 0.01), 0.01),
    ],
)
def test_qk_norm(outcome: str, accuracy: Accuracy, spread: float) -> None:
    verdict = judge("W-qknorm", "qk-norm", image_results("qk-norm", accuracy, spread=spread))
    assert verdict.verdict == outcome, verdict.sentence


@pytest.mark.parametrize(
    ("outcome", "gain", "spread"),
    [
        ("reproduced", 0.03, 0.002),
        ("contradicted", -0.03, 0.002),
        ("contradicted", 0.0, 0.002),
        ("undecided", 0.0, 0.03),
    ],
)
def test_gate(outcome: str, gain: float, spread: float) -> None:
    results = image_results(
        "gate", lambda result: 0.85 + (gain if result.gate else 0.05) * (result.alpha == 1), spread=spread
    )
    verdict = judge("W-gate", "gate", results)
    assert verdict.verdict == outcome, verdict.sentence
    assert verdict.numbers["gain without a gate"][0] == pytest.approx(0.05, abs=0.02)


FINDINGS = [
    ((0.0, -0.04), 0.002, "relu/L is within a point of softmax", "relu is behind softmax, −4"),
    ((0.06, 0.0), 0.025, "relu/L is ahead of softmax, +", "relu cannot be told apart from softmax yet"),
]


@pytest.mark.parametrize(("leads", "spread", "with_length", "without"), FINDINGS)
def test_the_finding_is_told_in_a_sentence(
    leads: tuple[float, float], spread: float, with_length: str, without: str
) -> None:
    lead = {"relu/L": leads[0], "relu": leads[1]}
    results = image_results("alpha", lambda result: 0.8 + lead.get(result.phi, 0.0), spread=spread)
    sentence = study.load("alpha").finding(results, SETUP)  # type: ignore[attr-defined]
    assert sentence.startswith(with_length)
    assert without in sentence
    assert "at L = 16, 49, 196" in sentence
    low = image_results("alpha", lambda result: 0.3, spread=spread)
    assert study.load("alpha").finding(low, SETUP) == ""  # type: ignore[attr-defined]


def test_below_the_bar_of_softmax_nothing_is_decided_and_lengths_above_it_still_count() -> None:
    low = judge(
        "W-identity", "alpha", image_results("alpha", lambda result: 0.7 - 0.1 * (result.activation == "identity"))
    )
    assert low.verdict == "undecided"
    assert low.sentence.startswith("Nothing can be decided: softmax has not learned enough: 70.")
    assert "relu minus identity at α = 1: +9.9" in low.sentence

    def short_ones_learn(result: Result) -> float:
        return (0.85 if result.tokens < 100 else 0.6) - 0.1 * (result.activation == "identity")

    some = judge("W-identity", "alpha", image_results("alpha", short_ones_learn))
    assert some.verdict == "reproduced"
    assert list(some.numbers["by length"]) == ["16", "49"]
    assert "Lengths that are left out: softmax has not learned enough: 60." in some.sentence


def test_a_study_over_sizes_decides_nothing_if_compute_does_not_help() -> None:
    results = image_results(
        "scaling",
        lambda result: 0.85 - 0.02 * log_tenfold(result),
        spread=0.0,
        time=lambda result: result.train_flops / 1e9,
    )
    verdict = judge("W-match", "scaling", results)
    assert verdict.verdict == "undecided"
    assert "a tenfold of CPU time changes the accuracy of softmax by −2.0 points" in verdict.sentence


def test_a_rate_of_its_own_is_judged_beside_softmaxs_and_must_not_contradict_it() -> None:
    setup = dataclasses.replace(SETUP, own_rates=(("relu", 1e-3),))
    same = image_results("alpha", lambda result: 0.85 - 0.05 * (result.alpha == 0), setup=setup)
    own = [
        dataclasses.replace(result, key=f"{i:016x}", lr=1e-3, accuracy=0.88 + 0.001 * result.seed)
        for i, result in enumerate(same)
        if result.phi == "relu"
    ]
    results = [result for result in same if result.lr == setup.lr and result.activation in ("relu", "softmax")]
    verdict = next(v for v in study.load("alpha").verdicts([*results, *own], setup) if v.claim == "W-degrade")
    assert verdict.numbers["drop"][0] == pytest.approx(0.05, abs=0.01)
    assert verdict.numbers["with its own rate"][0] == pytest.approx(-0.03, abs=0.01)
    assert verdict.verdict == "undecided"
    assert "each φ's own rate says less than 0" in verdict.sentence


def test_a_gate_cannot_remove_what_was_not_needed() -> None:
    results = image_results("gate", lambda result: 0.85 - 0.03 * (result.alpha == 1))
    verdict = judge("W-gate", "gate", results)
    assert verdict.verdict == "undecided"
    assert verdict.sentence.startswith("α = 1 minus α = 0 with a gate: −2.9")


@pytest.mark.parametrize(
    ("outcome", "ratio", "spread"),
    [("reproduced", 1.09, 0.02), ("contradicted", 1.4, 0.02), ("contradicted", 1.0, 0.02), ("undecided", 1.09, 0.8)],
)
def test_the_cost_of_the_gate(outcome: str, ratio: float, spread: float) -> None:
    rounds = tuple(ratio * math.exp(spread * place) for place in (-1, -0.5, 0, 0.5, 1))
    verdict = gate.cost_verdict([gate.Cost("S/16", 196, (9.0, 9.0), 0.1), gate.Cost("S/8", 784, rounds, 0.06)])
    assert verdict.verdict == outcome, verdict.sentence
    assert verdict.numbers["time"]["S/8"][0] == pytest.approx(ratio - 1)


def test_a_gate_is_timed_on_every_length_and_its_multiply_adds_are_one_projection_more() -> None:
    runs = gate.costs_to_measure(SETUP)
    costs = gate.collect_costs([run.result("done", numbers=run.measure(Stop())) for run in runs])
    assert [(cost.variant, cost.tokens) for cost in costs] == [("mu/7", 16), ("mu/4", 49), ("mu/2", 196)]
    # mu has width 32 and an MLP of 128: one more projection beside four, the MLP and the products with L = 196 keys
    assert costs[-1].macs == pytest.approx(1024 / (4 * 1024 + 8192 + 2 * 32 * 196), abs=1e-6)
    assert all(len(cost.ratios) == gate.ROUNDS and min(cost.ratios) > 0 for cost in costs)


NAMES = ("scaling", "alpha", "qk-norm", "gate")
MEASURED = ("W-init", "W-gatecost")  # on untrained models, without any run


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_decides_nothing_and_still_has_numbers(name: str) -> None:
    results = image_results(
        name, lambda result: 0.8 - 0.2 * (result.alpha == 0) - 0.1 * (result.activation == "identity"), seeds=(4,)
    )
    for verdict in study.load(name).verdicts(results, SETUP):
        if verdict.claim not in MEASURED:
            assert verdict.verdict == "undecided"
            assert ("no interval" in verdict.sentence) != (verdict.claim == "W-alpha")
            assert verdict.seeds == [4]


@pytest.mark.parametrize("name", NAMES)
def test_without_runs_nothing_is_decided(name: str) -> None:
    for verdict in study.load(name).verdicts([], SETUP):
        assert verdict.verdict == "undecided"
        assert "nothing to judge" in verdict.sentence


@pytest.mark.parametrize("name", NAMES)
def test_any_part_of_a_grid_can_be_judged_and_drawn(name: str) -> None:
    results = image_results(name, lambda result: 0.7)
    for part in (results[:1], results[1:2], results[: len(results) // 3 + 5], results[::7]):
        for verdict in study.load(name).verdicts(part, SETUP):
            json.dumps(dataclasses.asdict(verdict), allow_nan=False)
        assert study.load(name).figures(part, SETUP)


def test_diverged_runs_count_as_chance_and_the_sentence_says_so() -> None:
    results = image_results(
        "alpha", lambda result: 0.8, lost=lambda result: result.alpha == 0 and result.activation == "relu"
    )
    verdict = judge("W-degrade", "alpha", results)
    assert verdict.numbers["drop"][0] == pytest.approx((0.8 - 0.1) / 3, abs=0.01)  # one h of three, of ten classes
    assert "9 runs diverged and count as chance" in verdict.sentence


@pytest.mark.parametrize("name", ["scaling", "alpha", "qk-norm", "gate"])
def test_failed_runs_count_for_nothing(name: str) -> None:
    results = image_results(name, lambda result: 0.8)
    one = [dataclasses.replace(result, status="failed", accuracy=None, ten_shot=None) for result in results[:1]]
    claims = [verdict.claim for verdict in study.load(name).verdicts(results, SETUP) if verdict.claim not in MEASURED]
    for claim in claims:
        left, without = judge(claim, name, [*one, *results[1:]]), judge(claim, name, results[1:])
        assert left.numbers == without.numbers
        assert judge(
            claim, name, [dataclasses.replace(result, status="failed", accuracy=None) for result in results]
        ).verdict == ("undecided")


def test_runs_that_all_diverged_decide_nothing() -> None:
    results = image_results("qk-norm", lambda result: 0.8, lost=lambda result: True)
    assert judge("W-qknorm", "qk-norm", results).verdict == "undecided"


def test_seeds_that_only_one_side_has_are_left_out() -> None:
    results = image_results("scaling", relu_minus_softmax(0.0), spread=0.0)
    results = [result for result in results if result.phi == "softmax" or result.seed != 2]
    verdict = judge("W-match", "scaling", results)
    assert "6 settings, 12 pairs" in verdict.sentence
