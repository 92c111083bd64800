"""`nomax bench train`: it runs, checks first, and says where the time goes. No test looks at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nomax.bench import train
from nomax.bench.train import FORMULA, LOADING, OURS, PARTS, PEAK, PLAIN, REST, SOFTMAX, TIMM
from nomax.ops import cpu


def quick(output: Path, **changes: Any) -> train.Options:
    return train.Options(**{"models": ("pico/4", "text"), "smoke": True, "output": output, **changes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_smoke_run_measures_every_participant_and_the_parts_of_a_step(
    tmp_path: Path, dtype: str, measured: Any
) -> None:
    assert train.run(quick(tmp_path, dtypes=(dtype,))) == 0
    raw = measured("train")
    assert raw["finished"]
    images, text = raw["cases"]
    assert set(images["samples"]) == {OURS, SOFTMAX, FORMULA, PLAIN, TIMM, PEAK}
    assert set(text["samples"]) == {OURS, SOFTMAX, FORMULA, PLAIN, PEAK}
    assert images["items"] == 4
    assert images["flop"] > 6 * 4 * 49 * 4 * 64 * 64  # six per image, patch and weight of the attentions alone
    assert [(check["name"], check["right"]) for check in raw["checks"]] == [(OURS, True)] * 2
    assert set(raw["facts"]["parts"]) == {f"pico/4, {dtype}", f"text, {dtype}"}
    for parts in raw["facts"]["parts"].values():
        assert set(parts) == {*PARTS, REST, LOADING}
        assert parts["products"] > 0
    assert f"| text | {dtype} | 1 |" in (tmp_path / "train.md").read_text()
    assert "<svg" in (tmp_path / "train.svg").read_text()


def test_softmax_as_a_formula_is_softmax_and_is_what_that_participant_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64)
    mask = torch.rand(5, 5) < 0.7
    mask[:, 0] = True
    for others in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": torch.randn(5, 5).double(), "scale": 0.3}):
        ours = train.softmax_formula(query, key, value, **others)
        theirs = F.scaled_dot_product_attention(query, key, value, **others)
        torch.testing.assert_close(ours, theirs)
    calls: list[torch.dtype] = []
    formula = train.softmax_formula
    monkeypatch.setattr(
        train,
        "softmax_formula",
        lambda query, *rest, **named: calls.append(query.dtype) or formula(query, *rest, **named),
    )
    softmax = train._task("pico/4", "bfloat16", True, "softmax")
    step = train._step(softmax)
    train._call(SOFTMAX, step)()
    assert not calls
    train._call(FORMULA, step)()
    assert set(calls) == {torch.bfloat16}


def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    right = cpu.attend

    def wrong(problem: Any) -> Any:
        out, *rows = right(problem)
        return out * 1.01, *rows

    monkeypatch.setattr(cpu, "attend", wrong)
    monkeypatch.setattr(cpu, "attend_plainly", lambda *arguments: None)
    assert train.run(quick(tmp_path, models=("text",))) == 1
    raw = measured("train")
    assert not raw["checks"][0]["right"]
    assert raw["cases"] == []


def test_an_unknown_model_is_answered_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.run(quick(tmp_path, models=("pico4",))) == 2
    assert "there is no model 'pico4'; did you mean pico/4?" in capsys.readouterr().err
