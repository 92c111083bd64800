"""The study of sequence parallelism: its grid, and what it makes of counts, errors and the modelled machines."""

import pytest

from nomax.parallel.measure import EXACT, KEPT, LAYERS, ROUNDED, Machine, errors, modelled
from nomax.parallel.peers import WAYS
from nomax.study.images import sequence_parallel
from nomax.study.images.sequence_parallel import CORES, RingError, SplitExchanges, SplitTime
from nomax.study.images.setup import SETUPS

SETUP = SETUPS["default"]


def results(softmax_gathers=1):
    """Results in which softmax gathers so often, forwards, where keys stay, and relu/L once."""
    rows = []
    for ranks in (2, 4):
        numbers, seconds = {}, {CORES: (2.0,)}
        for phi, schedule in WAYS:
            gathers = softmax_gathers if phi == "softmax" and schedule.startswith("keys stay") else 1
            gathers += schedule == "keys stay, sums first"
            numbers[f"{phi}, {schedule}"] = (gathers, 1, 0, 0, 0, 1, 0, ranks, 1e6, 2e6)
            seconds[f"{phi}, {schedule}"] = (0.003, 0.001, 0.002)
        rows.append(SplitExchanges(ranks).result("done", numbers=numbers))
        rows.append(SplitTime(ranks).result("done", numbers=seconds))
    growth = {f"{phi}, {EXACT}": (1e-3, 1e-3, 1e-3) for phi in ("softmax", "relu/L")}
    growth |= {f"softmax, {ROUNDED}": (1e-3, 2e-3, 4e-3), f"relu/L, {ROUNDED}": (1e-3, 2e-3, 3e-3)}
    return [*rows, RingError(most=4).result("done", numbers=growth)]


@pytest.mark.parametrize(("gathers", "outcome"), [(2, "reproduced"), (1, "contradicted"), (0, "contradicted")])
def test_it_is_judged_by_the_fewest_exchanges_with_the_same_memory(gathers, outcome):
    (verdict,) = sequence_parallel.verdicts(results(gathers), SETUP)
    assert verdict.verdict == outcome
    assert f"all queries: 7 and {6 + gathers}" in verdict.sentence
    assert f"before it adds up partial outputs needs {7 + gathers} exchanges" in verdict.sentence
    assert "1.00 (relu/L, all in float32), 4.00 (softmax, parts in bfloat16)" in verdict.sentence


def test_errors_of_rings_follow_the_precision_of_parts():
    line = errors(64, 4, seeds=(0,))
    for phi in ("softmax", "relu/L"):
        assert line[f"{phi}, {EXACT}"][4] == pytest.approx(line[f"{phi}, {EXACT}"][1], rel=0.01)
        assert line[f"{phi}, {ROUNDED}"][4] > line[f"{phi}, {EXACT}"][4]
    ours = line[f"relu/L, {KEPT}"]
    assert ours[4] == pytest.approx(ours[1], rel=0.01)
    assert ours[4] < line[f"relu/L, {ROUNDED}"][4]


def test_without_runs_nothing_is_judged():
    (verdict,) = sequence_parallel.verdicts([], SETUP)
    assert verdict.verdict == "undecided"


@pytest.mark.parametrize("rows", [[], results()])
def test_figures_are_drawn_from_results(rows):
    for figure in sequence_parallel.figures(rows, SETUP):
        assert b"<svg" in figure.render(".svg")
    costs, ring, model = sequence_parallel.figures(rows, SETUP)
    assert len(model.table.rows) == len(LAYERS) * 3 * 6
    if rows:
        assert (4, "softmax", "keys stay", 1, 2, 0, 4, 3.0, 2.0) in costs.table.rows
        assert "share 2 cores" in costs.caption
        assert ("softmax, parts in bfloat16", 4, 0.004) in ring.table.rows


def test_a_smoke_test_is_small():
    assert all(run.flops < 1e9 for run in sequence_parallel.grid(SETUPS["smoke"], (0,)))
    assert len(sequence_parallel.grid(SETUP, (0,))) == 6


def test_a_ring_on_a_fast_network_never_waits_and_on_a_slow_one_does():
    layer = LAYERS["131,072 positions"]
    fast, slow = Machine(bandwidth=1e15, latency=0.0), Machine(bandwidth=1e6)
    assert modelled(layer, 8, fast)["relu/L", "keys travel"][1] == 0
    assert modelled(layer, 8, slow)["relu/L", "keys travel"][1] > 1
    waits = {way: wait for way, (_, wait) in modelled(layer, 8).items()}
    assert waits["relu/L", "keys stay"] < waits["softmax", "keys stay"] < 1.02 * waits["relu/L", "keys stay"]
