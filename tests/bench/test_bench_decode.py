"""`nomax bench decode`: it runs, all attend to the context, a wrong result gets no ratio. No test looks at times."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nomax.bench import decode, harness
from nomax.bench.decode import BOTH, DYNAMIC, GENERATE, PEAK, PHI, SOFTMAX, STATIC
from nomax.bench.results import Case, Check, Results
from nomax.models.reluformer import Caches
from nomax.nn import Attention, Memory


def quick(output: Path | None = None, **changes: Any) -> decode.Options:
    return decode.Options(**{"smoke": True, "threads": (1,), "output": output, **changes})


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "bytes_in_a_fresh_process", lambda *_: 1000)


def models(dtype: str = "float32") -> dict[str, Any]:
    return decode.make_models(quick().load(), dtype)


def some_text(length: int) -> torch.Tensor:
    return torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def changed(caches: Caches) -> None:
    """Change the value at the first position of the context, in the first layer."""
    caches.own[0].entries()[1][:, :, 0] += 9


def test_a_smoke_run_measures_every_participant_and_writes_its_results(tmp_path: Path, measured: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    assert decode.run(quick(tmp_path)) == 0
    raw = measured("decode")
    assert raw["finished"]
    want = [(f"context of {n}", dtype) for dtype in ("float32", "bfloat16") for n in (16, 48)]
    assert [(case["shape"], case["dtype"]) for case in raw["cases"]] == want
    assert all(set(case["samples"]) == {PHI, SOFTMAX, GENERATE, PEAK} for case in raw["cases"])
    wanted = [(*place, name) for place in want for name in (PHI, SOFTMAX)]
    assert [(check["shape"], check["dtype"], check["name"]) for check in raw["checks"] if check["right"]] == wanted
    assert all(0 < share < 1 for shares in raw["facts"]["zeros"].values() for share in shares.values())
    assert set(raw["facts"]["generate's cache"].values()) <= {STATIC, DYNAMIC}
    assert [entry["failure"] for entry in raw["memory"]] == [None] * 8
    assert {goal["verdict"] for goal in raw["goals"]} == {"not measured"}  # toys say nothing about goals
    text = (tmp_path / "decode.md").read_text()
    assert "smoke run" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| context of")]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == want
    assert not any("–" in row for row in rows)
    assert [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| 16 ")] == [PHI, SOFTMAX, *BOTH]
    assert "<desc>" in (tmp_path / "decode.svg").read_text()


@pytest.mark.usefixtures("no_process")
def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    pytest.importorskip("transformers")
    right = Attention._attend

    def wrong(self: Attention, *arguments: Any, **settings: Any) -> Any:
        out, rows = right(self, *arguments, **settings)
        return out * 1.1 if self.backend is None else out, rows

    monkeypatch.setattr(Attention, "_attend", wrong)
    assert decode.run(quick(tmp_path, dtypes=("float32",))) == 1
    assert measured("decode")["cases"] == []
    printed = capsys.readouterr().out
    assert "WRONG context of 16, float32, relu/L" in printed
    assert "WRONG context of 16, float32, softmax" in printed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_softmax_on_sdpa_gives_the_logits_of_its_formula_with_the_same_weights_and_cache(dtype: str) -> None:
    model = models(dtype)[SOFTMAX]
    check = Check("context", dtype, SOFTMAX)
    decode.compare(check, model, decode.filled(model, 37, 1))
    assert check.right, check


@torch.inference_mode()
@pytest.mark.parametrize("name", [PHI, SOFTMAX])
def test_decoding_gives_the_logits_of_whole_texts_without_a_cache(name: str) -> None:
    model = models()[name]
    text, caches = some_text(11), model.caches()
    model.decode(text, caches=caches)
    got = decode.decode(model, caches, 3)
    text = torch.cat([text, torch.tensor([[model.config.begin]])], 1)
    for _ in range(3):
        want = model(text)[:, -1]
        text = torch.cat([text, want.argmax(1, keepdim=True)], 1)
    torch.testing.assert_close(got, want)


@torch.inference_mode()
def test_the_check_of_a_long_context_has_all_of_it_in_float64() -> None:
    cache = decode.filled(models()[PHI], 16, 1).own[0]
    twice = decode.DoubleCache(cache)
    key, value = torch.randn(2, *cache.entries()[0][:, :, :1].shape, dtype=torch.float64)
    for got, old, new in zip(twice.append(key, value), cache.entries(), (key, value), strict=True):
        assert torch.equal(got, torch.cat([old.double(), new], 2))
    assert (twice.length, cache.length) == (17, 16)


@pytest.mark.parametrize("name", [PHI, SOFTMAX])
def test_our_models_attend_to_the_loaded_context_and_leave_it_as_it_was(name: str) -> None:
    model = models()[name]
    caches = decode.filled(model, 16, 3)
    before = decode.decode(model, caches, 3)
    assert torch.equal(decode.decode(model, caches, 3), before)
    assert (caches.position, caches.own[0].length) == (16, 16)
    changed(caches)
    assert not torch.allclose(decode.decode(model, caches, 3), before)


@pytest.mark.parametrize("kind", [STATIC, DYNAMIC])
def test_generate_computes_only_new_tokens_and_attends_to_the_loaded_context(kind: str) -> None:
    pytest.importorskip("transformers")
    ours = models()[PHI]
    peer, caches, widths = decode.llama(ours.config, "float32"), decode.filled(ours, 16, 2), []
    peer.register_forward_pre_hook(
        lambda _, inputs, settings: widths.append(settings["input_ids"].shape[1]), with_kwargs=True
    )
    generation = decode.Generation(peer, caches, 2, kind)
    before = generation()
    assert widths == [1, 1]
    torch.testing.assert_close(generation(), before)
    changed(caches)
    assert not torch.allclose(decode.Generation(peer, caches, 2, kind)(), before)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [STATIC, DYNAMIC])
def test_generate_gives_the_logits_of_a_whole_text_without_a_cache(kind: str) -> None:
    pytest.importorskip("transformers")
    ours = models()[PHI]
    peer, caches, text = decode.llama(ours.config, "float32"), ours.caches(), some_text(11)
    context = peer(text, use_cache=True).past_key_values
    for cache, layer in zip(caches.own, context.layers, strict=True):
        cache.append(layer.keys, layer.values)
    caches.position = 11
    got = decode.Generation(peer, caches, 2, kind)()
    text = torch.cat([text, torch.tensor([[ours.config.begin]])], 1)
    first = peer(text).logits[:, -1]
    first[:, ours.config.end] = -torch.inf  # which min_new_tokens forbids
    want = peer(torch.cat([text, first.argmax(1, keepdim=True)], 1)).logits[:, -1]
    torch.testing.assert_close(got, want)


@torch.inference_mode()
def test_zeros_are_those_of_the_weights_that_the_layers_tell_of_the_whole_text() -> None:
    model = models()[PHI]
    text, caches = some_text(11), model.caches()
    model.decode(text, caches=caches)
    counted = decode.zeros(model, caches)
    inputs: dict[type, list[Any]] = {Attention: [], Memory: []}
    for module in model.modules():
        if type(module) in inputs:
            module.register_forward_pre_hook(lambda module, given: inputs[type(module)].append((module, given[0])))
    model(torch.cat([text, torch.tensor([[model.config.begin]])], 1))
    rows = [module.weights(x, is_causal=True)[:, :, -1] for module, x in inputs[Attention]]
    slots = [(x[:, -1] @ module.keys.T).clamp(min=0) for module, x in inputs[Memory]]
    want = {"attention": torch.stack(rows), "memories": torch.stack(slots)}
    assert counted == pytest.approx({name: float((weights == 0).double().mean()) for name, weights in want.items()})
    assert all(0 < share < 1 for share in counted.values())


@torch.inference_mode()
def test_zeros_are_counted_among_the_weights_of_the_token() -> None:
    model = models()[PHI]
    caches = decode.filled(model, 16, 1)
    for cache in caches.own:
        cache.entries()[0].zero_()  # all scores of the context are zero, and so are its weights
    assert decode.zeros(model, caches)["attention"] >= 16 / 17


@pytest.mark.usefixtures("no_process")
def test_a_trained_model_is_measured_on_a_text_that_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Any
) -> None:
    pytest.importorskip("transformers")
    model = quick().load()
    monkeypatch.setattr(decode, "load_text", lambda *_: type("Trained", (), {"model": model}))
    settings: dict[str, Any] = {"model": tmp_path / "run", "dtypes": ("float32",)}
    assert decode.run(quick(tmp_path, **settings)) == 0
    assert "those of a text that the model wrote" in (tmp_path / "decode.md").read_text()
    assert decode.run(quick(tmp_path, tokens=10**6, **settings)) == 2


@pytest.mark.usefixtures("no_process")
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, measured: Any, stop_at_race: Any) -> None:
    pytest.importorskip("transformers")
    stop_at_race(1)
    assert decode.run(quick(tmp_path)) == 130
    raw = measured("decode")
    assert raw["finished"] is None
    assert [case["shape"] for case in raw["cases"]] == ["context of 16"]


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"dim": 100}, "--dim 100 must be a multiple of 64"),
        ({"contexts": (0,)}, "--contexts must be at least 1"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"smoke": False, "load_limit": -1.0}, "the machine is busy"),
    ],
)
def test_a_slip_in_the_options_is_answered_before_anything_runs(
    changes: dict[str, Any], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert decode.run(quick(tmp_path, **changes)) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_goals_and_shares_of_the_bandwidth_follow_from_the_best_samples() -> None:
    samples = {PHI: [2.0, 1.0], SOFTMAX: [1.5, 3.0], GENERATE: [1.4], PEAK: [1.0]}
    case = Case("context of 8,192", "float32", "decoding", 1, ours=(PHI,), samples=samples, flop=3.0, peak_flop=6.0)
    run = Results({}, {}, {}, "2026-01-01", 0.0, cases=[case])
    assert (case.peak_share(), case.peak_share(SOFTMAX)) == (0.5, 1 / 3)
    assert [goal.judge(run)["verdict"] for goal in decode.GOALS] == ["not measured", "met", "not met"]
