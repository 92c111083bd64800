"""`nomax bench vit`: it runs, tells no ratio of a wrong result, keeps what it has. No test looks at a time."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import nomax
from nomax.bench import render, vit
from nomax.bench.results import Case, Results
from nomax.bench.vit import COMPILED, FREE, INFERENCE, OURS, PREPARED, SOFTMAX, TIMM, TRAINING
from nomax.models.prepared import PreparedViT


def quick(output: Path, **changes: Any) -> vit.Options:
    return vit.Options(**{"models": ("S/16",), "smoke": True, "threads": (1,), "output": output, **changes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_smoke_run_measures_every_mode_and_participant_and_writes_its_results(
    tmp_path: Path, dtype: str, measured: Any
) -> None:
    assert vit.run(quick(tmp_path, models=("S/16", "S/8"), dtypes=(dtype,))) == 0
    raw = measured("vit")
    assert raw["finished"]
    assert [(case["shape"], case["mode"]) for case in raw["cases"]] == [
        (model, mode) for model in ("S/16", "S/8") for mode in (INFERENCE, TRAINING)
    ]
    for case in raw["cases"]:
        prepared = {PREPARED} if case["mode"] == INFERENCE else set()  # the compiled peer sits out smoke runs
        assert set(case["samples"]) == {OURS, TIMM, SOFTMAX, FREE} | prepared
        assert case["computed"]["best"][TIMM] == min(case["samples"][TIMM])
    assert [(check["name"], check["right"]) for check in raw["checks"]] == [
        (SOFTMAX, True),
        (OURS, True),
        (PREPARED, True),
    ] * 2
    assert {goal["verdict"] for goal in raw["goals"]} == {"not measured"}  # toys say nothing about goals
    assert raw["versions"]["timm"]
    text = (tmp_path / "vit.md").read_text()
    assert "smoke run" in text
    assert f"| S/8 (2 images) | {dtype} | training | 1 |" in text


@pytest.mark.parametrize("broken", [SOFTMAX, OURS])
def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    def wrong(*arguments: Any, phi: Any, backend: str | None, **settings: Any) -> Tensor:
        out: Tensor = nomax.attention(*arguments, phi=phi, backend=backend, **settings)
        spoiled = str(phi) == ("softmax" if broken == SOFTMAX else broken) and backend is None
        return out * 1.01 if spoiled else out

    monkeypatch.setattr("nomax.nn.attention.attention", wrong)
    assert vit.run(quick(tmp_path)) == 1
    raw = measured("vit")
    assert {check["name"] for check in raw["checks"] if not check["right"]} == (
        {SOFTMAX} if broken == SOFTMAX else {OURS, PREPARED}  # which has the same attention
    )
    assert raw["cases"] == []
    assert f"WRONG S/16, float32, {broken}" in capsys.readouterr().out
    assert "Wrong results" in (tmp_path / "vit.md").read_text()


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, measured: Any, stop_at_race: Any) -> None:
    stop_at_race(1)
    assert vit.run(quick(tmp_path)) == 130
    raw = measured("vit")
    assert raw["finished"] is None
    assert [case["mode"] for case in raw["cases"]] == [INFERENCE]


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"models": ("s16",)}, "there is no model 's16'; did you mean S/16?"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"smoke": False, "load_limit": -1.0}, "the machine is busy"),
    ],
)
def test_a_slip_in_the_options_is_answered_before_anything_runs(
    changes: dict[str, Any], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vit.run(quick(tmp_path, **changes)) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_timm_the_answer_is_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert vit.run(quick(tmp_path)) == 2
    assert "pip install timm" in capsys.readouterr().err


def test_goals_are_judged_against_timm_by_the_best_samples() -> None:
    samples = {"relu/L": [3.0, 2.0], TIMM: [3.4, 5.0], FREE: [1.0], PREPARED: [4.0, 1.6], COMPILED: [2.4]}
    case = Case("S/8", "float32", INFERENCE, 2, ours=(OURS,), samples=samples, items=4)
    run = Results({"rounds": 2}, {}, {}, "2026-01-01", 0.0, cases=[case])
    outcomes = {(goal.text, goal.mode): goal.judge(run) for goal in vit.GOALS}
    assert len(outcomes) == 8
    outcome = outcomes["S/8 float32 against timm's softmax", INFERENCE]
    assert (outcome["verdict"], outcome["worst"]) == ("met", 2.125)
    assert outcomes["S/8 bfloat16 against timm's softmax", INFERENCE]["verdict"] == "not measured"
    run.machine = {"cpu": "a CPU", "cores": 2, "kernels": "avx2"}
    run.versions = {"nomax": "0", "torch": "0", "timm": "0"}
    assert (
        "| S/8 (4 images) | float32 | inference | 2 | 2 | 1.18 | 1.70× | – | 3.40× | 2.5 | 2.12× | 1.50× |"
        in render.markdown("vit", run, vit.report(run))
    )


def test_a_prepared_model_that_is_wrong_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    features = PreparedViT._features
    monkeypatch.setattr(PreparedViT, "_features", lambda self, images: features(self, images) * 1.01)
    assert vit.run(quick(tmp_path)) == 1
    raw = measured("vit")
    assert {check["name"] for check in raw["checks"] if not check["right"]} == {PREPARED}
    assert raw["cases"] == []
