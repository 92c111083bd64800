"""`nomax bench convert`: it runs, compares the same work, gives no ratio for a wrong result. No test looks at times."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nomax.bench import convert
from nomax.cli import main


def bench(*arguments: object) -> int:
    return main(["bench", "convert", *map(str, arguments)])


def test_a_smoke_run_measures_whole_and_ragged_batches(tmp_path: Path, measured: Any) -> None:
    assert bench("--smoke", "--output", tmp_path) == 0
    raw = measured("convert")
    assert raw["finished"]
    assert [case["mode"] for case in raw["cases"]] == ["whole", "ragged"]
    text = (tmp_path / "convert.md").read_text()
    assert "smoke run" in text
    assert "| whole | 2×16 | 0% | 1 |" in text
    assert "| ragged | 2×16 | 44% | 1 |" in text


def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    right = convert.make_batch
    calls = iter(range(100))

    def wrong(model: Any, inputs: Any) -> torch.Tensor:
        return torch.full((*inputs["input_ids"].shape, 4), float(next(calls)))

    monkeypatch.setattr(convert, "encode", wrong)
    monkeypatch.setattr(convert, "encode_packed", wrong)
    assert right(2, 16, ragged=True)["attention_mask"].sum() == 18
    assert bench("--smoke", "--output", tmp_path) == 1
    assert measured("convert")["cases"] == []


def test_a_slip_in_the_options_is_answered_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--output", tmp_path, "--width", "33") == 2
    assert "--width must be a multiple of 32" in capsys.readouterr().err
