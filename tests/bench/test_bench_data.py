"""`nomax bench data`: it runs, races the same work, tells no speed of wrong images. No test looks at a time."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import fill
from PIL import Image

from nomax import _compat
from nomax.bench import data, harness
from nomax.bench.results import Case, Results
from nomax.data.images.transforms import Augment


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.random_arrays, "__defaults__", (64, 32))


def test_a_smoke_run_races_all_pipelines_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    assert data.run(data.Options(smoke=True, output=tmp_path)) == 0
    raw = measured("data")
    assert raw["finished"]
    assert [goal["verdict"] for goal in raw["goals"]] == ["not measured"]  # toys say nothing about goals
    assert [(check["name"], check["right"]) for check in raw["checks"]] == [("folder", True), ("shards", True)]
    settings = {(case["shape"], case["workers"]): case for case in raw["cases"]}
    assert set(settings) == {(what, workers) for what in (data.PHOTOS, data.ARRAYS) for workers in (0, 1)}
    for (what, _), case in settings.items():
        assert set(case["samples"]) == (
            {"torchvision", "folder", "shards"} if what == data.PHOTOS else {"torchvision", "array"}
        )
        for name, samples in case["samples"].items():
            assert len(samples) == 2
            assert case["computed"]["per_second"][name] == case["items"] / min(samples) > 0
    assert raw["versions"]["torchvision"]
    text = (tmp_path / "data.md").read_text()
    assert "smoke run" in text
    assert "made from noise and shapes" in text
    assert "images/s" in capsys.readouterr().out


def test_the_users_own_folder_is_raced_but_not_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "private", {"a": 4, "b": 4}, 90, 70)
    assert data.run(data.Options(folder=folder, smoke=True, output=tmp_path)) == 0
    assert "private" not in (tmp_path / "data.json").read_text() + (tmp_path / "data.md").read_text()


def test_wrong_images_get_no_speed_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    right = Augment.resized
    monkeypatch.setattr(Augment, "resized", lambda *arguments: right(*arguments)[:, ::-1].copy())  # upside down
    assert data.run(data.Options(smoke=True, output=tmp_path)) == 1
    assert measured("data")["cases"] == []
    assert "WRONG" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "array_set", interrupted)
    assert data.run(data.Options(smoke=True, output=tmp_path)) == 130
    raw = measured("data")
    assert raw["finished"] is None
    assert {case["shape"] for case in raw["cases"]} == {data.PHOTOS}


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "load", lambda: 3.0)
    assert data.run(data.Options(output=tmp_path)) == 2
    assert "load average is 3.00" in capsys.readouterr().err
    assert data.run(data.Options(output=tmp_path, rounds=0, load_limit=9)) == 2
    assert "--rounds" in capsys.readouterr().err
    assert data.run(data.Options(output=tmp_path, folder=tmp_path / "nowhere", smoke=True)) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("samples", "verdict", "worst"),
    [
        ({"torchvision": [1.2, 1.3], "folder": [0.8, 1.5], "shards": [1.0, 9]}, "met", 1.2),
        ({"torchvision": [1.2, 1.3], "folder": [0.8, 1.5], "shards": [1.1, 9]}, "not met", 1.2 / 1.1),
        ({"torchvision": [], "folder": []}, "not measured", None),
    ],
)
def test_the_goal_is_judged_by_best_rounds(samples: dict[str, list[float]], verdict: str, worst: float | None) -> None:
    case = Case(data.PHOTOS, "float32", data.LOADING, 1, ours=("folder", "shards"), samples=samples, workers=1)
    outcome = data.GOALS[0].judge(Results({}, {}, {}, "", 0.0, cases=[case]))
    assert (outcome["verdict"], outcome.get("worst")) == (verdict, worst)


def test_the_race_uses_torchvisions_distribution_of_crops() -> None:
    """Else ours would have fewer pixels to resize."""
    _compat.torchvision()
    from torchvision.transforms import RandomResizedCrop

    image = Image.new("RGB", (500, 375))
    peer = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)])
    boxes = np.array([data.SameCrops(224).box(500, 375, 0, position) for position in range(3000)])
    ours = np.stack([boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]], axis=1)
    for mine, theirs in zip(ours.T, peer.T, strict=True):
        both = np.sort(np.concatenate([mine, theirs]))
        shares = [np.searchsorted(np.sort(values), both, "right") / 3000 for values in (mine, theirs)]
        assert np.abs(shares[0] - shares[1]).max() < 0.05  # Kolmogorov and Smirnov's


def test_generated_photos_are_as_heavy_as_photos_and_always_the_same() -> None:
    files = [data.photo(number) for number in range(3)]
    assert len(set(files)) == 3
    assert data.photo(1) == files[1]
    assert all(50_000 < len(file) < 150_000 for file in files)
    assert Image.open(io.BytesIO(files[0])).size == (500, 375)
