"""`nomax bench data`: it runs, races the same work, tells no speed of wrong images. No test looks at a time."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import fill
from PIL import Image

from nomax import _compat
from nomax.bench import data, data_results, photos, pipelines
from nomax.data.transforms import Augment


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.random_arrays, "__defaults__", (64, 32))


def found(folder: Path) -> Any:
    return json.loads((folder / "data.json").read_text())


def test_a_smoke_run_races_all_pipelines_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data.run(data.Options(smoke=True, output=tmp_path)) == 0
    results = found(tmp_path)
    assert results["finished"]
    assert results["verdict"] == "not measured"  # toys say nothing about goals
    assert max(results["differences"].values()) <= data_results.LARGEST_DIFFERENCE
    settings = {(case["what"], case["workers"]): case for case in results["cases"]}
    assert set(settings) == {(what, workers) for what in (data.PHOTOS, data.ARRAYS) for workers in (0, 1)}
    for (what, _), case in settings.items():
        assert set(case["samples"]) == (
            {"torchvision", "folder", "shards"} if what == data.PHOTOS else {"torchvision", "array"}
        )
        for name, samples in case["samples"].items():
            assert len(samples) == 2
            assert case["best"][name] == max(samples) > 0
    assert results["versions"]["torchvision"]
    text = (tmp_path / "data.md").read_text()
    assert "smoke run" in text
    assert "made from noise and shapes" in text
    assert "images/s" in capsys.readouterr().out


def test_the_users_own_folder_is_raced_but_not_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "private", {"a": 4, "b": 4}, 90, 70)
    assert data.run(data.Options(folder=folder, smoke=True, output=tmp_path)) == 0
    assert "private" not in (tmp_path / "data.json").read_text() + (tmp_path / "data.md").read_text()


def test_wrong_images_get_no_speed_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Augment.resized
    monkeypatch.setattr(Augment, "resized", lambda *arguments: right(*arguments)[:, ::-1].copy())  # upside down
    assert data.run(data.Options(smoke=True, output=tmp_path)) == 1
    assert found(tmp_path)["cases"] == []
    assert "WRONG" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipelines, "array_set", interrupted)
    assert data.run(data.Options(smoke=True, output=tmp_path)) == 130
    results = found(tmp_path)
    assert results["finished"] is None
    assert {case["what"] for case in results["cases"]} == {data.PHOTOS}


def test_what_cannot_be_measured_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data, "load", lambda: 3.0)
    assert data.run(data.Options(output=tmp_path)) == 2
    assert "load average is 3.00" in capsys.readouterr().err
    assert data.run(data.Options(output=tmp_path, rounds=0, load_limit=9)) == 2
    assert "--rounds" in capsys.readouterr().err
    assert data.run(data.Options(output=tmp_path, folder=tmp_path / "nowhere", smoke=True)) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("samples", "verdict"),
    [
        ({"torchvision": [100, 90], "folder": [150, 80], "shards": [120, 1]}, "met, worst 1.20×"),
        ({"torchvision": [100, 90], "folder": [150, 80], "shards": [110, 1]}, "not met in 1 of 2, worst 1.10×"),
        ({"torchvision": [], "folder": []}, "not measured"),
    ],
)
def test_the_verdict_compares_best_rounds_with_the_goal(samples: dict[str, list[float]], verdict: str) -> None:
    results = data.Results({}, {}, {}, "", False, 0.0, cases=[data.Case(data.PHOTOS, 1, samples)])
    assert results.verdict() == verdict


def test_the_race_uses_torchvisions_distribution_of_crops() -> None:
    """Else ours would have fewer pixels to resize."""
    _compat.torchvision()
    from torchvision.transforms import RandomResizedCrop

    image = Image.new("RGB", (500, 375))
    peer = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(3000)])
    boxes = np.array([pipelines.SameCrops(224).box(500, 375, 0, position) for position in range(3000)])
    ours = np.stack([boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]], axis=1)
    for mine, theirs in zip(ours.T, peer.T, strict=True):
        both = np.sort(np.concatenate([mine, theirs]))
        shares = [np.searchsorted(np.sort(values), both, "right") / 3000 for values in (mine, theirs)]
        assert np.abs(shares[0] - shares[1]).max() < 0.05  # Kolmogorov and Smirnov's


def test_generated_photos_are_as_heavy_as_photos_and_always_the_same() -> None:
    files = [photos.photo(number) for number in range(3)]
    assert len(set(files)) == 3
    assert photos.photo(1) == files[1]
    assert all(50_000 < len(file) < 150_000 for file in files)
    assert Image.open(io.BytesIO(files[0])).size == (500, 375)
