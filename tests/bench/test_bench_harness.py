"""What all benches share: checks, races, goals and tables. No test looks at a time."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nomax.bench import attention, harness, render
from nomax.bench.harness import Bench, Options, Run, ThreadedOptions, run_bench
from nomax.bench.peers import FORWARD, SHAPES
from nomax.bench.results import CannotMeasureError, Case, Check, Goal, PeakMemory, Results


def results(samples: dict[str, list[float]]) -> Results:
    case = Case("S/16", "float32", FORWARD, 1, ours=("relu/L", "gelu/L"), flop=1e9, samples=samples, peak_flop=2e9)
    run = Results({"rounds": 1}, {}, {}, "", 0.0, cases=[case], facts={"shapes": list(SHAPES.values())})
    run.memory = [PeakMemory("relu/L", FORWARD, 16_384, 1, 0.06)]
    return run


def goal(quantity: Any, bound: float, **more: Any) -> Goal:
    return Goal("a goal", quantity, bound, FORWARD, **{"peer": "sdpa", "shapes": ("S/16",), **more})


@pytest.mark.parametrize(
    ("wish", "verdict", "worst"),
    [
        (goal("speedup", 1.3), "met", 1.5),
        (goal("speedup", 1.6), "not met", 1.5),
        (goal("speedup", 1.0, ours=("relu/L", "gelu/L")), "not met", 0.75),
        (goal("time", 0.7), "met", 1 / 1.5),
        (goal("time", 0.6), "not met", 1 / 1.5),
        (goal("peak share", 0.5), "met", 0.5),
        (goal("memory share", 0.05, ours=("relu/L",)), "not met", 0.06),
        (goal("speedup", 1.0, peer="flex"), "not measured", None),
        (goal("speedup", 1.0, shapes=("S/8",)), "not measured", None),
        (goal("speedup", 1.0, shapes=()), "met", 1.5),
        (goal("speedup", 1.0, dtypes=("bfloat16",)), "not measured", None),
    ],
)
def test_a_goal_is_judged_by_its_worst_case_and_best_samples(wish: Goal, verdict: str, worst: float | None) -> None:
    run = results({"relu/L": [3.0, 2.0], "gelu/L": [4.0], "sdpa": [9.0, 3.0], "peak": [2.0]})
    outcome = wish.judge(run)
    assert outcome["verdict"] == verdict
    assert outcome.get("worst") == (None if worst is None else pytest.approx(worst))


def test_a_goal_of_what_was_wrong_is_not_judged_by_another_participant() -> None:
    run = results({"gelu/L": [4.0], "sdpa": [3.0]})  # relu/L, the first of ours, did not take part
    assert goal("speedup", 0.1).judge(run)["verdict"] == "not measured"


def test_tables_leave_out_what_was_not_measured() -> None:
    run = results({"relu/L": [2.0], "sdpa": [3.0]})
    run.machine, run.versions = harness.machine(), harness.versions()
    text = render.markdown("attention", run, attention.report(run))
    row = next(line for line in text.splitlines() if line.startswith("| S/16"))
    assert row == "| S/16 (16×6×197×64) | 0 | 1.50× | – | – | – |"


def test_a_slow_call_is_sampled_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SLOW", -1.0)
    assert len(harness.race({"slow": lambda: None}, 5, 1e-6)["slow"]) == 3


def test_participants_take_turns_there_and_back() -> None:
    order: list[str] = []
    harness.race({name: lambda name=name: order.append(name) for name in "ab"}, 2, 0.0)  # type: ignore[misc]
    assert order == list("ab" + "ab" + "ba")


@pytest.mark.parametrize(("error", "right"), [(1e-7, True), (3e-7, False), (math.nan, False)])
def test_an_error_may_be_twice_that_of_plain_pytorch_in_every_part(error: float, right: bool) -> None:
    exact = {"output": torch.full((3,), 1e-3, dtype=torch.float64)}
    plain = {"output": exact["output"] + 1e-7}
    check = Check("shape", "float32", "name")
    for off in (0.0, error, 0.0):
        check.compare({"output": exact["output"] + off}, plain, exact)
    assert check.right == right
    assert ("off by" in check.reason()) != right


def test_a_check_that_compared_nothing_is_not_passed() -> None:
    check = Check("shape", "float32", "name")
    assert not check.right
    assert check.reason() == "nothing was compared"


@dataclass(frozen=True)
class Toy(ThreadedOptions):
    """A bench of nothing, with one more number."""

    size: int = 3


def bench(measure: Any) -> Bench:
    return Bench("toy", measure, lambda results: ["a report"], (goal("speedup", 1.0),))


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"size": 0}, "--size must be at least 1"),
        ({"threads": ()}, "--threads must be at least 1"),
        ({"smoke": False, "load_limit": -1.0}, "the machine is busy"),
    ],
)
def test_a_new_bench_checks_its_options_before_it_measures(
    changes: dict[str, Any], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(options: Options, run: Run) -> Any:
        raise AssertionError

    assert run_bench(bench(measure), Toy(**{"smoke": True, "output": tmp_path, **changes})) == 2
    assert f"nomax bench toy: {answer}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_new_bench_needs_only_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: Any) -> None:
    def measure(options: Toy, run: Run) -> Any:
        run.expect(3)
        with run.checking("good", "float32", "ours") as check:
            check.bound("value", 0.0, 1.0)
        with run.checking("bad", "float32", "ours"):
            raise RuntimeError("fell over")
        case = Case("good", "float32", FORWARD, 1, ours=("ours",), items=10)
        with case.attempting("absent"):
            raise CannotMeasureError("it is not here")
        run.race(case, {"ours": lambda: None, "sdpa": lambda: None})
        yield "a table"

    threads = torch.get_num_threads()
    assert run_bench(bench(measure), Toy(smoke=True, output=tmp_path)) == 1
    assert torch.get_num_threads() == threads
    out, text = capsys.readouterr().out, (tmp_path / "toy.md").read_text()
    assert "a table\n" in out
    assert "WRONG bad, float32, ours: RuntimeError: fell over" in out
    assert "- bad, float32, ours: RuntimeError: fell over" in text
    assert "absent could not run: it is not here (good, float32, forward, 1 thread)" in text
    raw = measured("toy")
    assert [check["right"] for check in raw["checks"]] == [True, False]
    assert set(raw["cases"][0]["computed"]["per_second"]) == {"ours", "sdpa"}
    assert raw["options"]["output"] is None
    assert not (tmp_path / "toy.svg").exists()


def test_the_bytes_of_a_call_are_measured_in_a_process_of_its_own() -> None:
    size = harness.bytes_in_a_fresh_process(attention.long_call_bytes, "relu/L", FORWARD, 2048)
    assert isinstance(size, int)
    assert size > 2048 * 64 * 4  # the result, at least
    failure = harness.bytes_in_a_fresh_process(attention.long_call_bytes, "relu/L", FORWARD, -1)
    assert re.match(r"\w*Error", str(failure))
