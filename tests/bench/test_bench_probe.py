"""`nomax bench probe`: it runs, compares the same work, gives no ratio for a wrong result. No test looks at times."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nomax.bench import probe
from nomax.cli import main


def bench(*arguments: object) -> int:
    return main(["bench", "probe", *map(str, arguments)])


def test_a_smoke_run_measures_all_tasks_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    assert bench("--smoke", "--output", tmp_path) == 0
    raw = measured("probe")
    assert raw["finished"]
    assert [case["mode"] for case in raw["cases"]] == list(probe.TASKS)
    for case in raw["cases"]:
        assert len(case["samples"]["nomax"]) == len(case["samples"]["scikit-learn"]) == 2
        speedup = min(case["samples"]["scikit-learn"]) / min(case["samples"]["nomax"])
        assert case["computed"]["speedup"] == {"nomax": {"scikit-learn": speedup}}
    text = (tmp_path / "probe.md").read_text()
    assert "smoke run" in text
    assert "| sweep | 3 | 1 |" in text
    assert "scikit-learn" in capsys.readouterr().out


@pytest.mark.parametrize("task", probe.TASKS)
def test_the_peer_does_the_same_work(task: str) -> None:
    """More images than features, and fewer: 300 images of 5 classes, up to 125 of them chosen, 40 features."""
    features = probe.make_features(300, 300, 40, 5)
    mine, theirs = (participant(features, probe.TASKS[task]) for participant in (probe.ours, probe.peer))
    if not probe.TASKS[task].predict:
        assert mine.size == theirs.size == 0
        return
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= 1.5 / 300
    assert 0.21 < mine.mean() < 0.95


def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    right = probe.ours
    monkeypatch.setattr(probe, "ours", lambda features, task: right(features, task) - 0.01)
    assert bench("--smoke", "--output", tmp_path) == 1
    assert measured("probe")["cases"] == []
    assert "WRONG 3 classes, float32, sweep: accuracy off by 0.01 (allowed 0.001)" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, measured: Any, stop_at_race: Any) -> None:
    stop_at_race(1)
    assert bench("--smoke", "--output", tmp_path) == 130
    raw = measured("probe")
    assert raw["finished"] is None
    assert len(raw["cases"]) == 1


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
