"""`nomax bench attention`: it runs, tells no ratio of a wrong result, keeps what it has. No test looks at a time."""

import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nomax
from nomax.bench import attention, goals, machine, memory, peers, race, results, shapes, tables
from nomax.bench.gate import check
from nomax.cli import main

QUICK = attention.Options(peers=("sdpa", "eager"), phis=(), memory=False, smoke=True)


def quick(output: Path, **changes: Any) -> attention.Options:
    return attention.Options(**{**vars(QUICK), "output": output, **changes})


def load(folder: Path) -> Any:
    return json.loads((folder / "attention.json").read_text())


def test_a_smoke_run_measures_every_shape_and_peer_and_writes_its_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nomax.cli", "bench", "attention", "--smoke", "--output", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr

    found = load(tmp_path)
    assert found["finished"]
    assert {case["shape"] for case in found["cases"]} == set(shapes.SHAPES)
    assert all(gate["green"] for gate in found["gates"])
    assert not any(case["unavailable"] for case in found["cases"]), "a peer could not run"
    raced = {name for case in found["cases"] for name in case["samples"]}
    assert raced == {*peers.PEERS, results.OURS, results.UNCAUSAL, "gelu/L"}
    for case in found["cases"]:
        for name, samples in case["samples"].items():
            assert len(samples) == 2
            assert case["computed"]["best"][name] == min(samples)
    assert all(entry["bytes"] is not None for entry in found["memory"])
    assert {goal["verdict"] for goal in found["goals"]} == {"not measured"}  # toys say nothing about goals
    assert found["machine"]["cpu"]
    assert found["versions"]["torch"] == torch.__version__

    assert ElementTree.parse(tmp_path / "attention.svg").getroot().tag.endswith("svg")
    text = (tmp_path / "attention.md").read_text()
    assert "smoke run" in text
    for name in shapes.SHAPES:
        assert name in text or name == "tiny"


def wrong(name: str) -> Callable[..., Tensor]:
    """nomax.attention, but wrong: in its values, its gradients, or altogether."""
    right = nomax.attention

    def attend(*arguments: Any, **settings: Any) -> Tensor:
        out: Tensor = right(*arguments, **settings)
        if name == "values":
            return out * 1.01
        if name == "gradients":
            return out * 0.99 + out.detach() * 0.01
        if name == "NaN":
            return out * float("nan")
        raise RuntimeError("the kernel fell over")

    return attend


@pytest.mark.parametrize("mistake", ["values", "gradients", "NaN", "crash"])
def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nomax, "attention", wrong(mistake))
    assert attention.run(quick(tmp_path, shapes=("S/16", "padded"))) == 1
    found = load(tmp_path)
    assert not any(gate["green"] for gate in found["gates"])
    assert found["cases"] == []
    out = capsys.readouterr().out
    assert "WRONG S/16, float32, relu/L" in out
    assert not re.search(r"\d\.\d\d×", out.split("Goals")[0])
    assert "Wrong results" in (tmp_path / "attention.md").read_text()


def test_one_wrong_activation_does_not_silence_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, broken = nomax.attention, wrong("values")
    monkeypatch.setattr(
        nomax, "attention", lambda *a, phi, **s: (broken if phi == "gelu/L" else right)(*a, phi=phi, **s)
    )
    assert attention.run(quick(tmp_path, shapes=("S/16",), phis=("gelu/L",))) == 1
    for case in load(tmp_path)["cases"]:
        assert "relu/L" in case["computed"]["speedup"]
        assert "gelu/L" not in case["samples"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_the_gate_is_green_for_the_plain_formula_itself(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shapes.SHAPES[name].shrunk()
    inputs = shapes.make_inputs(shape, dtype)
    monkeypatch.setattr("nomax.bench.gate.ours", peers.eager)
    assert check(inputs, "gelu/L", gradients=True, everywhere=True).green


def test_a_peer_that_cannot_run_or_is_wrong_is_noted_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> Any:
        raise NotImplementedError("not on this machine\nand more")

    def doubles(inputs: shapes.Inputs, *_: Any) -> Any:
        return lambda: 2 * peers.eager(inputs)(inputs.query, inputs.key, inputs.value)

    table = {"eager": peers.Peer(doubles, "", computes_relu=True), "flex": peers.Peer(raises, "")}
    monkeypatch.setattr(attention, "PEERS", {**peers.PEERS, **table})
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    assert attention.run(quick(tmp_path, shapes=("decode",), peers=("eager", "flex", "sdpa"))) == 0
    (case,) = load(tmp_path)["cases"]
    assert case["unavailable"]["flex"] == "NotImplementedError: not on this machine"
    assert "differs from ours by 100" in case["unavailable"]["eager"]
    assert set(case["samples"]) == {"relu/L", "sdpa"}


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return race.race(*arguments)

    monkeypatch.setattr(attention, "race", interrupted)
    assert attention.run(quick(tmp_path)) == 130
    found = load(tmp_path)
    assert found["finished"] is None
    assert len(found["cases"]) == 2
    assert "was stopped" in (tmp_path / "attention.md").read_text() or found["smoke"]
    assert (tmp_path / "attention.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--shapes", "s16"], "there is no shape 's16'; did you mean S/16?"),
        (["--shapes", "casual-1024"], "did you mean causal-1024?"),
        (["--shapes", "xyzzy"], "There are: S/32, S/16"),
        (["--peers", "sdpq"], "there is no peer 'sdpq'; did you mean sdpa?"),
        (["--phis", "softpluss/L"], "did you mean 'softplus/L'?"),
        (["--phis", "sigmoid"], "write sigmoid/L"),
        (["--rounds", "0"], "--rounds and --threads must be at least 1"),
        (["--load-limit", "-1"], "the machine is busy"),
    ],
)
def test_a_slip_in_the_options_is_answered_before_anything_runs(
    arguments: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "attention", "--output", str(tmp_path), *arguments]) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "file"
    results.write(target, "first")

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        results.write(target, "second")
    assert target.read_text() == "first"
    assert list(target.parent.iterdir()) == [target]


def test_operations_are_counted_on_visible_keys_only() -> None:
    square = shapes.Shape("", "", 2, 3, 4, 4, 5)
    assert square.flop(shapes.FORWARD) == 4 * 2 * 3 * 4 * 4 * 5
    assert square.flop(shapes.BACKWARD) == 3.5 * square.flop(shapes.FORWARD)
    assert shapes.Shape("", "", 1, 1, 4, 4, 1, causal=True).flop(shapes.FORWARD) == 4 * (1 + 2 + 3 + 4)
    padded = shapes.Shape("", "", 2, 1, 10, 10, 1, padded=True)
    assert padded.lengths() == [3, 10]
    assert padded.flop(shapes.FORWARD) == 4 * 10 * 13


def result(samples: dict[str, list[float]], shape: str = "S/16", mode: str = shapes.FORWARD) -> results.Results:
    case = results.Case(shape, "float32", mode, 1, 1e9, samples, peak_flop=2e9)
    run = results.Results({"rounds": 1}, {}, {}, list(shapes.SHAPES.values()), "", False, 0.0, cases=[case])
    run.memory = [memory.Memory("relu/L", shapes.FORWARD, 16_384, 1, 0.06)]
    return run


def goal(quantity: Any, bound: float, **more: Any) -> goals.Goal:
    return goals.Goal("a goal", quantity, bound, shapes.FORWARD, ("S/16",), **more)


@pytest.mark.parametrize(
    ("wish", "verdict", "worst"),
    [
        (goal("speedup", 1.3), "met", 1.5),
        (goal("speedup", 1.6), "not met", 1.5),
        (goal("speedup", 1.0, phis=("relu/L", "gelu/L")), "not met", 0.75),
        (goal("time", 0.7), "met", 1 / 1.5),
        (goal("time", 0.6), "not met", 1 / 1.5),
        (goal("peak share", 0.5), "met", 0.5),
        (goal("memory share", 0.05), "not met", 0.06),
        (goal("speedup", 1.0, peer="flex"), "not measured", None),
    ],
)
def test_a_goal_is_judged_by_its_worst_case_and_best_samples(
    wish: goals.Goal, verdict: str, worst: float | None
) -> None:
    run = result({"relu/L": [3.0, 2.0], "gelu/L": [4.0], "sdpa": [9.0, 3.0], "peak": [2.0]})
    outcome = goals.judge(wish, run)
    assert outcome["verdict"] == verdict
    assert outcome.get("worst") == (None if worst is None else pytest.approx(worst))


def test_goals_speak_of_things_that_are_measured() -> None:
    for wish in goals.GOALS:
        assert set(wish.shapes) <= set(shapes.SHAPES)
        assert wish.peer in {*peers.PEERS, results.UNCAUSAL}
        assert set(wish.phis) <= {results.OURS, *attention.Options.phis}
        assert all(wish.mode in shapes.SHAPES[name].modes or len(wish.shapes) > 1 for name in wish.shapes)


def test_a_slow_call_is_sampled_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "SLOW", -1.0)
    assert len(race.race({"slow": lambda: None}, 5, 1e-6)["slow"]) == 3


def test_participants_take_turns_there_and_back() -> None:
    order: list[str] = []
    race.race({name: lambda name=name: order.append(name) for name in "ab"}, 2, 0.0)  # type: ignore[misc]
    assert order == list("ab" + "ab" + "ba")


def test_tables_leave_out_what_was_not_measured() -> None:
    run = result({"relu/L": [2.0], "sdpa": [3.0]})
    run.machine, run.versions = machine.machine(), machine.versions()
    row = next(line for line in tables.markdown(run).splitlines() if line.startswith("| S/16"))
    assert row == "| S/16 (16×6×197×64) | 0 | 1.50× | – | – | – |"
