"""`nomax bench probe`: it runs, compares the same work, gives no ratio for a wrong result. No test looks at times."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nomax.bench import probe, ridge
from nomax.cli import main


def bench(*arguments: object) -> int:
    return main(["bench", "probe", *map(str, arguments)])


def test_a_smoke_run_measures_all_work_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--smoke", "--output", tmp_path) == 0
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["finished"]
    assert [case["work"] for case in found["cases"]] == list(ridge.WORKS)
    for case in found["cases"]:
        assert len(case["samples"]["nomax"]) == len(case["samples"]["scikit-learn"]) == 2
        assert case["speedup"] == min(case["samples"]["scikit-learn"]) / min(case["samples"]["nomax"])
    text = (tmp_path / "probe.md").read_text()
    assert "smoke run" in text
    assert "| sweep | 3 | 1 |" in text
    assert "scikit-learn" in capsys.readouterr().out


@pytest.mark.parametrize("work", ridge.WORKS)
def test_the_peer_does_the_same_work(work: str) -> None:
    """More images than features, and fewer: 300 images of 5 classes, up to 125 of them chosen, 40 features."""
    features = ridge.make_features(300, 300, 40, 5)
    mine, theirs = (participant(features, ridge.WORKS[work]) for participant in (ridge.ours, ridge.peer))
    if not ridge.WORKS[work].predict:
        assert mine.size == theirs.size == 0
        return
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= 1.5 / 300
    assert 0.21 < mine.mean() < 0.95


def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = probe.ours
    monkeypatch.setattr(probe, "ours", lambda features, work: right(features, work) - 0.01)
    assert bench("--smoke", "--output", tmp_path) == 1
    assert all(case["speedup"] is None for case in json.loads((tmp_path / "probe.json").read_text())["cases"])
    assert "WRONG by 0.01" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = probe.race, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*arguments)

    monkeypatch.setattr(probe, "race", interrupted)
    assert bench("--smoke", "--output", tmp_path) == 130
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["finished"] is None
    assert len(found["cases"]) == 1


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--classes", "200", "--images", "100"], "--classes 200 needs at least as many --images"),
        (["--load-limit", "-1"], "the machine is busy"),
    ],
)
def test_a_slip_in_the_options_is_answered_before_anything_runs(
    arguments: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--output", tmp_path, *arguments) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
