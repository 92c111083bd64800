"""`nomax bench memory`: it runs, tells no ratio of a wrong result, keeps what it has. No test looks at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nomax.bench import harness, memory, render
from nomax.bench.memory import OURS, PLAIN
from nomax.bench.results import Case, PeakMemory, Results
from nomax.nn import Memory


def quick(output: Path, **changes: Any) -> memory.Options:
    return memory.Options(**{"smoke": True, "threads": (1,), "output": output, **changes})


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "bytes_in_a_fresh_process", lambda *_: 1000)


def test_a_smoke_run_measures_time_and_memory_and_writes_its_results(tmp_path: Path, measured: Any) -> None:
    pytest.importorskip("matplotlib")
    assert memory.run(quick(tmp_path)) == 0
    raw = measured("memory")
    assert raw["finished"]
    assert [(case["shape"], case["mode"]) for case in raw["cases"]] == [
        (f"{phi}, {slots} slots, 32 tokens", mode)
        for phi in ("relu", "softmax")
        for slots in ("64", "1,024")
        for mode in ("inference", "training")
    ]
    for case in raw["cases"]:
        assert set(case["samples"]) == {OURS, PLAIN}
        assert list(case["computed"]["speedup"]) == [OURS]
    assert [entry["failure"] for entry in raw["memory"]] == [None, None]
    assert all(entry["bytes"] > 0 for entry in raw["memory"])
    assert all(check["right"] for check in raw["checks"])
    assert {goal["verdict"] for goal in raw["goals"]} == {"not measured"}  # toys say nothing about goals
    assert "smoke run" in (tmp_path / "memory.md").read_text()
    assert "<desc>" in (tmp_path / "memory.svg").read_text()


@pytest.mark.usefixtures("no_process")
def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    right = Memory._look_up
    monkeypatch.setattr(Memory, "_look_up", lambda *arguments: right(*arguments) * 1.01)
    assert memory.run(quick(tmp_path, phis=("relu",))) == 1
    assert measured("memory")["cases"] == []
    assert "WRONG relu, 64 slots, 32 tokens" in capsys.readouterr().out
    assert "Wrong results" in (tmp_path / "memory.md").read_text()


@pytest.mark.usefixtures("no_process")
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, measured: Any, stop_at_race: Any) -> None:
    stop_at_race(3)
    assert memory.run(quick(tmp_path)) == 130
    raw = measured("memory")
    assert raw["finished"] is None
    assert len(raw["cases"]) == 3


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"slots": (0,)}, "--slots must be at least 1"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"smoke": False, "load_limit": -1.0}, "the machine is busy"),
    ],
)
def test_a_slip_in_the_options_is_answered_before_anything_runs(
    changes: dict[str, Any], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert memory.run(quick(tmp_path, **changes)) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_memory_that_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "bytes_in_a_fresh_process", lambda *_: "MemoryError")
    (entry,) = memory.peak_memory("relu", 64, 8, 4)
    assert (entry.failure, entry.bytes, entry.share) == ("MemoryError", None, None)


def test_both_have_the_same_keys_and_values_and_the_same_results() -> None:
    for phi in ("relu", "softmax"):
        layers = memory.make_layers(phi, 33, 16, block=5)
        x = torch.randn(9, 16)
        torch.testing.assert_close(layers[OURS](x), layers[PLAIN](x))


def test_goals_are_judged_against_the_plain_version_in_time_and_memory() -> None:
    samples = {OURS: [2.0, 3.0], PLAIN: [1.9, 4.0]}
    shape = "softmax, 65,536 slots, 1,024 tokens"
    case = Case(shape, "float32", "training", 1, ours=(OURS,), samples=samples, flop=1e9)
    peaks = [
        PeakMemory("relu", "training", 1024, 20, 0.2, unit="tokens"),
        PeakMemory("softmax", "training", 4096, 30, 0.3, unit="tokens"),
        PeakMemory("softmax, plain", "training", 4096, 100, unit="tokens"),
    ]
    run = Results({"rounds": 2, "dim": 4}, {}, {}, "2026-01-01", 0.0, cases=[case], memory=peaks)
    outcomes = {(goal.text, goal.mode): goal.judge(run) for goal in memory.GOALS}
    time = outcomes["65,536 slots, time", "training"]
    assert (time["verdict"], time["worst"]) == ("met", 0.95)
    share = outcomes["65,536 slots, peak memory", "training"]
    assert (share["verdict"], share["worst"], share["where"]) == ("not met", 0.3, "softmax, tokens = 4096")
    assert outcomes["few slots, time", "training"]["verdict"] == "not measured"
    run.machine = {"cpu": "a CPU", "cores": 2, "kernels": "avx2"}
    run.versions = {"nomax": "0", "torch": "0"}
    assert "| softmax, 65,536 slots, 1,024 tokens | training | 1 | 2 s | 0 | 0.95× |" in render.markdown(
        "memory", run, memory.report(run)
    )
