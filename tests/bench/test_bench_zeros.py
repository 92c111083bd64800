"""`nomax bench zeros`: it runs, tells no ratio of a wrong result, keeps what it has. No test looks at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nomax.bench import decode, render, zeros
from nomax.bench.decode import PEAK
from nomax.bench.results import Case, Results
from nomax.bench.zeros import DENSE, OURS, SDPA
from nomax.nn import Memory


def quick(output: Path, **changes: Any) -> zeros.Options:
    return zeros.Options(**{"smoke": True, "threads": (1,), "output": output, **changes})


def test_a_smoke_run_measures_each_kind_and_counts_its_zeros(tmp_path: Path, measured: Any) -> None:
    pytest.importorskip("matplotlib")
    assert zeros.run(quick(tmp_path)) == 0
    raw = measured("zeros")
    assert raw["finished"]
    sizes = [f"dim 64, 128 slots, tokens = 4, {share} zeros" for share in ("0%", "95%")]
    names = [(zeros.ATTENTION, f"4 queries per key head, {share} zeros") for share in ("0%", "95%")]
    names += [(mode, name) for mode in (zeros.MEMORY, zeros.GATED) for name in sizes]
    read, *cases = raw["cases"]
    assert [(case["mode"], case["shape"]) for case in cases] == names
    for case in cases:
        peers = {OURS, DENSE, PEAK} | ({SDPA} if case["mode"] == zeros.ATTENTION else set())
        assert set(case["samples"]) == peers
        assert case["samples"][PEAK] == read["samples"][PEAK]
        assert case["computed"]["peak_share"] > 0
    assert all(check["right"] for check in raw["checks"])
    counted = raw["facts"]["zeros"]
    assert all(share == 0 if name.endswith(" 0% zeros") else 0.9 < share < 1 for name, share in counted.items())
    assert len(counted) == 6
    assert {goal["verdict"] for goal in raw["goals"]} == {"not measured"}  # toys say nothing about goals
    assert "smoke run" in (tmp_path / "zeros.md").read_text()
    assert "<desc>" in (tmp_path / "zeros.svg").read_text()


def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    right = Memory.forward
    monkeypatch.setattr(Memory, "forward", lambda *arguments: right(*arguments) * 1.01)
    assert zeros.run(quick(tmp_path)) == 1
    assert {case["mode"] for case in measured("zeros")["cases"]} == {zeros.BANDWIDTH, zeros.ATTENTION}
    assert "WRONG dim 64, 128 slots" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, measured: Any, stop_at_race: Any) -> None:
    stop_at_race(3)
    assert zeros.run(quick(tmp_path)) == 130
    raw = measured("zeros")
    assert raw["finished"] is None
    assert len(raw["cases"]) == 3


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"shares": (0.5, 1.5)}, "--shares 0.5 1.5 must be from 0 to 1"),
        ({"tokens": (1, 7)}, "--tokens 7 must be at most 6"),
        ({"smoke": False, "load_limit": -1.0}, "the machine is busy"),
    ],
)
def test_a_slip_in_the_options_is_answered_before_anything_runs(
    changes: dict[str, Any], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert zeros.run(quick(tmp_path, **changes)) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("tokens", [1, 4])
def test_each_token_has_zeros_of_its_own(tokens: int, share: float) -> None:
    layer = zeros.make_memory((64, 2000), True, torch.float32)
    zero = layer.weights(zeros.set_zeros(layer, tokens, share)) == 0
    error = (share * (1 - share) / zero.numel()) ** 0.5
    assert abs(float(zero.double().mean()) - share) <= 5 * error
    of_all = share**tokens
    assert abs(float(zero.all(0).double().mean()) - of_all) <= 5 * (of_all * (1 - of_all) / 2000) ** 0.5


def test_the_zeros_of_a_model_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    class Loaded:
        model = decode.Options(smoke=True).load()

    monkeypatch.setattr(zeros, "load_text", lambda *_: Loaded)
    assert zeros.run(quick(tmp_path, model=tmp_path / "model")) == 0
    counted = measured("zeros")["facts"]["model"]
    assert 0 < counted["memories"] < 1
    assert f"{counted['memories']:.1%} in its memories" in (tmp_path / "zeros.md").read_text()


def test_goals_are_judged_against_dense() -> None:
    shape = zeros.memory_shape((512, 2048), 1, 0.95)
    case = Case(
        shape, "bfloat16", zeros.GATED, 1, ours=(OURS,), samples={OURS: [1.0, 2.0], DENSE: [2.2, 2.4]}, flop=4.0
    )
    run = Results({"rounds": 2, "dtypes": ["bfloat16"]}, {}, {}, "2026-01-01", 0.0, cases=[case])
    run.facts |= {"zeros": {f"{zeros.GATED}, {shape}": 0.95}, "model": None}
    outcomes = {goal.text: goal.judge(run) for goal in zeros.GOALS}
    told = outcomes["gated memory: one token, 95% zeros"]
    assert (told["verdict"], told["worst"]) == ("not met", 2.2)
    assert outcomes["gated memory: never slower"]["verdict"] == "met"
    assert outcomes["memory: one token, 90% zeros"]["verdict"] == "not measured"
    run.machine = {"cpu": "a CPU", "cores": 2, "kernels": "avx2"}
    run.versions = {"nomax": "0", "torch": "0"}
    assert f"| gated memory, {shape} | 1 | 1 s | 2.20× | – | – | 95% |" in render.markdown(
        "zeros", run, zeros.report(run)
    )
