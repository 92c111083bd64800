"""`nomax bench shards`: it reads what was written, and tells no speed of wrong images. No test looks at a time."""

from pathlib import Path
from typing import Any

import pytest

from nomax.bench import shards
from nomax.bench.results import Case, PeakMemory, Results
from nomax.data.images.shards import ShardSource


def test_a_smoke_run_measures_opening_and_random_access(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    assert shards.run(shards.Options(smoke=True, output=tmp_path)) == 0
    raw = measured("shards")
    assert raw["finished"]
    assert [goal["verdict"] for goal in raw["goals"]] == ["not measured"] * 3
    assert raw["checks"][0]["right"]
    assert [set(case["samples"]) for case in raw["cases"]] == [{"open"}, {"read", "decode"}]
    assert raw["memory"][0]["bytes"] is not None
    assert raw["facts"]["bytes"] == 32 * 1024 + 320 * 2048
    assert "320 PNG files" in (tmp_path / "shards.md").read_text()
    assert "per second" in capsys.readouterr().out


def test_wrong_images_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    monkeypatch.setattr(ShardSource, "read", lambda self, index: b"")
    assert shards.run(shards.Options(smoke=True, output=tmp_path)) == 1
    assert measured("shards")["cases"] == []


@pytest.mark.parametrize("kept", [True, False])
def test_goals_are_absolute(kept: bool) -> None:
    case = Case("x", "index", shards.OPENING, 1, ours=("open",), samples={"open": [0.5 if kept else 2.0]})
    read = Case("x", "PNG", shards.RANDOM, 1, ours=("read",), samples={"read": [1.0]}, items=5001 if kept else 4999)
    memory = PeakMemory("open", shards.OPENING, 7, bytes=99_000_000 if kept else 101_000_000)
    results = Results({}, {}, {}, "", 0.0, cases=[case, read], memory=[memory])
    assert [goal.judge(results)["verdict"] for goal in shards.GOALS] == ["met" if kept else "not met"] * 3
