"""`nomax bench translate`: it runs, races the same work, tells no ratio of a wrong result. No test looks at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nomax.bench import render, translate
from nomax.bench.results import CannotMeasureError, Case, Check, Results
from nomax.bench.translate import ENTMAX, FREE, MARIAN, OURS, PLAIN, SOFTMAX, SPARSEMAX
from nomax.models import ReLUFormerConfig
from nomax.nn import Attention

CONFIG = ReLUFormerConfig(50, 32, 2, 1, 1, 64, dropout=0.0, max_length=64)


def quick(output: Path, **changes: Any) -> translate.Options:
    return translate.Options(**{"smoke": True, "threads": (1,), "sentences": (6,), "output": output, **changes})


def tokens(count: int, length: int) -> Tensor:
    return torch.randint(3, CONFIG.vocabulary, (count, length))


def test_a_smoke_run_measures_every_mode_and_participant_and_writes_its_results(tmp_path: Path, measured: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    assert translate.run(quick(tmp_path)) == 0
    raw = measured("translate")
    assert raw["finished"]
    variants = {OURS, SOFTMAX, SPARSEMAX, ENTMAX, FREE}
    want = [
        *((f"documents of {n}", mode, variants | more) for n in (8, 16) for mode, more in MODES),
        ("sentences of 6", "decoding", {OURS, MARIAN}),
    ]
    assert [(case["shape"], case["mode"], set(case["samples"])) for case in raw["cases"]] == want
    assert all(list(case["computed"]["speedup"]) == [OURS] for case in raw["cases"])
    assert [check["right"] for check in raw["checks"]] == [True, True]
    assert {goal["verdict"] for goal in raw["goals"]} == {"not measured"}  # toys say nothing about goals
    assert raw["versions"]["transformers"]
    assert raw["versions"]["entmax"]
    assert "smoke run" in (tmp_path / "translate.md").read_text()
    assert "<desc>" in (tmp_path / "translate.svg").read_text()


MODES = (("training", {PLAIN}), ("inference", set[str]()))


def test_a_wrong_result_gets_no_ratio_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured: Any
) -> None:
    right = Attention._attend

    def wrong(self: Attention, *arguments: Any) -> Any:
        out, rows = right(self, *arguments)
        return out * 1.01 if self.backend is None else out, rows

    monkeypatch.setattr(Attention, "_attend", wrong)
    assert translate.run(quick(tmp_path, modes=("training",))) == 1
    assert measured("translate")["cases"] == []
    assert "WRONG model, float32, ReLUFormer" in capsys.readouterr().out


def test_translations_that_do_not_score_what_their_text_does_are_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translate.Endless.from_config(CONFIG).eval().requires_grad_(False)
    right, wrong = (Check("sentences", "float32", OURS) for _ in range(2))
    translate.compare_scores(right, model, tokens(3, 7), 9)
    assert right.right
    monkeypatch.setattr(translate, "beam_search", spoiled(translate.beam_search))
    translate.compare_scores(wrong, model, tokens(3, 7), 9)
    assert not wrong.right


def spoiled(search: Any) -> Any:
    def wrong(*arguments: Any, **settings: Any) -> Any:
        return [[h._replace(tokens=h.tokens[::-1]) for h in hs] for hs in search(*arguments, **settings)]

    return wrong


def test_both_translate_into_as_many_tokens_as_asked_for_and_the_last_is_the_end() -> None:
    pytest.importorskip("transformers")
    source = tokens(3, 7)
    model = translate.Endless.from_config(CONFIG).eval().requires_grad_(False)
    steps: list[str] = []
    model.decoder[0].register_forward_hook(lambda *_: steps.append("ours"))
    for hypotheses in translate.translation(model, source, 9)():
        assert [len(hypothesis.tokens) for hypothesis in hypotheses] == [8] * 4
    assert steps == ["ours"] * 9
    peer = translate.marian(CONFIG)
    steps.clear()
    peer.model.decoder.layers[0].register_forward_hook(lambda *_: steps.append("theirs"))
    translations = translate.generation(peer, source, 9)()
    assert steps == ["theirs"] * 9
    translate.check_lengths(translations, 9, CONFIG)
    with pytest.raises(CannotMeasureError, match="not 8 tokens"):
        translate.check_lengths(translations, 8, CONFIG)
    translations = translations.clone()
    translations[1, 4] = CONFIG.end
    with pytest.raises(CannotMeasureError, match="too early"):
        translate.check_lengths(translations, 9, CONFIG)


def test_marian_has_the_shape_of_the_reluformer() -> None:
    pytest.importorskip("transformers")
    mine, peer = translate.Endless.from_config(CONFIG), translate.marian(CONFIG)
    own = {name: weight.numel() for name, weight in mine.named_parameters()}
    # What Marian has more: the biases of feed-forward layers; what it has less: gains, and norms at the end of a stack.
    matrices = sum(
        size for name, size in own.items() if name.endswith(("weight", "keys", "values")) and "norm" not in name
    )
    others = {id(p): p.numel() for p in peer.parameters() if p.dim() == 2}
    positions = {id(p) for name, p in peer.named_parameters() if "positions" in name}
    assert matrices == sum(size for each, size in others.items() if each not in positions)


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, measured: Any, stop_at_race: Any) -> None:
    stop_at_race(1)
    assert translate.run(quick(tmp_path, modes=("inference",))) == 130
    raw = measured("translate")
    assert raw["finished"] is None
    assert [case["shape"] for case in raw["cases"]] == ["documents of 8"]


@pytest.mark.parametrize(
    ("changes", "answer"),
    [
        ({"documents": (500,)}, "--documents 500: lengths must divide 2,048"),
        ({"sentences": (1,)}, "--sentences must be at least 2"),
        ({"rounds": 0}, "--rounds must be at least 1"),
        ({"smoke": False, "load_limit": -1.0}, "the machine is busy"),
    ],
)
def test_a_slip_in_the_options_is_answered_before_anything_runs(
    changes: dict[str, Any], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate.run(quick(tmp_path, **{"modes": ("inference",), **changes})) == 2
    assert answer in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_transformers_the_answer_is_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert translate.run(quick(tmp_path)) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_goals_are_judged_by_the_best_samples_of_each() -> None:
    training, decoding = {OURS: [3.0, 2.0], SOFTMAX: [2.5, 9.0]}, {OURS: [1.0], MARIAN: [4.0, 3.5]}
    own: dict[str, Any] = {"ours": (OURS,)}
    cases = [
        Case("documents of 2,048", "float32", "training", 1, samples=training, items=2048, **own),
        Case("sentences of 32", "float32", "decoding", 2, samples=decoding, items=64, **own),
    ]
    run = Results({"rounds": 2}, {}, {}, "2026-01-01", 0.0, cases=cases, facts={"config": vars(CONFIG)})
    outcomes = {(goal.text, goal.mode): goal.judge(run) for goal in translate.GOALS}
    softmax = outcomes["against softmax (SDPA), 2,048 tokens", "training"]
    assert (softmax["verdict"], softmax["worst"]) == ("not met", 1.25)
    decoding = outcomes["against Hugging Face's Marian, 4 beams", "decoding"]
    assert (decoding["verdict"], decoding["worst"]) == ("met", 3.5)
    assert outcomes["against softmax (SDPA), 512 tokens", "training"]["verdict"] == "not measured"
    run.machine = {"cpu": "a CPU", "cores": 2, "kernels": "avx2"}
    run.versions = {"nomax": "0", "torch": "0"}
    assert "| documents of 2,048 | training | 1 | 1,024 | 1.25× |" in render.markdown(
        "translate", run, translate.report(run)
    )
