"""`nomax rows` on models of text: every attention by layer and head, against weights that are computed by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from evaluate_helpers import nomax, write_splits
from precision import EPSILON, REORDERED
from text_corpora import corpus

from nomax import evaluate, models
from nomax.data.text import Example, Tokenizer, sentences
from nomax.models import ReLUFormer
from nomax.train import TextConfig
from nomax.train.config import to_json

pytest.importorskip("sentencepiece")
SIZES = {"dim": 16, "heads": 2, "slots": 12, "max_length": 64, "learned_gain": None}
EXAMPLES = [
    Example([9, 7, 8], [5, 6, 7, 8, 9], "first", ((0, 0),)),
    Example([6] * 9, [7, 5], "second", ((0, 1),)),
]


def made(phi: str, encoder: int = 2, decoder: int = 2, vocabulary: int = 12, **changes: object) -> ReLUFormer:
    torch.manual_seed(0)
    layers = {"encoder_layers": encoder, "decoder_layers": decoder}
    return ReLUFormer(vocabulary, phi=phi, **{**SIZES, **layers, **changes}).eval().requires_grad_(False)


def by_hand(model: ReLUFormer, part: str, layer: int) -> list[list[list[float]]]:
    """The weights relu(q·k/√D)/n of each head, as lists of the n keys that each query sees, from the inputs alone."""
    block = (model.encoder if part == "encoder" else model.decoder)[layer]
    attention = block.source_attention if part == "source" else block.attention
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = attention.register_forward_pre_hook(
        lambda module, given: inputs.append((given[0], given[0] if given[1] is None else given[1]))
    )
    for example in EXAMPLES:
        target = torch.tensor([[1, *example.target]])
        model(torch.tensor([[*example.source, 2]]), target) if model.encoder else model(target)
    hook.remove()
    heads: list[list[list[float]]] = [[], []]
    for x, read in inputs:
        if part == "source":
            query, key = attention.q(x)[0], attention.kv(read)[0, :, :16]
        else:
            query, key = attention.qkv(x)[0, :, :16], attention.qkv(x)[0, :, 16:32]
        for head in range(2):
            ours = slice(8 * head, 8 * head + 8)
            for i, q in enumerate(query[:, ours].double()):
                seen = key[: i + 1, ours] if part == "decoder" else key[:, ours]
                scores = [float(q @ k) / math.sqrt(8) for k in seen.double()]
                heads[head].append([max(score, 0) / len(scores) for score in scores])
    return heads


@pytest.mark.parametrize("encoder", [2, 0])
def test_statistics_are_those_of_the_weights_themselves(encoder: int) -> None:
    model = made("relu/L", encoder)
    statistics = evaluate.row_statistics(model, EXAMPLES)
    parts = ["encoder", "decoder", "source"] if encoder else ["decoder"]
    assert [(row.part, row.layer, row.head) for row in statistics] == [
        (part, layer, head) for part in parts for layer in range(2) for head in range(2)
    ]
    for row in statistics:
        weights = by_hand(model, row.part, row.layer)[row.head]
        every = [weight for line in weights for weight in line]
        sums = [sum(line) for line in weights]
        mean = sum(sums) / len(sums)
        alive = [line for line in weights if sum(line) > 0]
        shares = [[weight / sum(line) for weight in line] for line in alive]
        entropies = [-sum(p * math.log(p) for p in line if p > 0) for line in shares]
        effective = [sum(line) ** 2 / sum(weight**2 for weight in line) for line in alive]
        # Scores of float32 projections, by hand in float64; in a deviation, digits cancel.
        assert row.length == pytest.approx(len(every) / len(weights))
        assert row.mean_weight == pytest.approx(sum(every) / len(every), rel=REORDERED)
        assert row.row_sum == pytest.approx(mean, rel=REORDERED)
        deviation = math.sqrt(sum((s - mean) ** 2 for s in sums) / len(sums))
        assert row.row_sum_sd == pytest.approx(deviation, rel=10 * REORDERED)
        assert row.zeros == pytest.approx(every.count(0) / len(every))
        assert row.empty == pytest.approx(1 - len(alive) / len(weights))
        assert row.entropy == pytest.approx(sum(entropies) / len(alive), rel=REORDERED)
        assert row.effective_keys == pytest.approx(sum(effective) / len(alive), rel=REORDERED)
    # Rows that see one key, rows of zeros and rows with some zeros are all among them.
    assert any(row.zeros > 0 for row in statistics)
    assert any(row.empty > 0 for row in statistics if row.part == "decoder")


def test_softmax_rows_sum_to_one_over_the_keys_that_are_seen() -> None:
    statistics = evaluate.row_statistics(made("softmax"), EXAMPLES)
    # With begin or end the texts have 4 and 10 tokens of source, 6 and 3 of target.
    lengths = {"encoder": (16 + 100) / 14, "decoder": (21 + 6) / 9, "source": (6 * 4 + 3 * 10) / 9}
    for row in statistics:
        assert row.row_sum == pytest.approx(1, abs=8 * EPSILON)
        assert row.zeros == row.empty == 0
        assert row.length == pytest.approx(lengths[row.part])


def test_signed_weights_have_no_entropy() -> None:
    statistics = evaluate.row_statistics(made("gelu/L", 1, 1), EXAMPLES)
    assert all(math.isnan(row.entropy) and math.isfinite(row.effective_keys) for row in statistics)
    with pytest.raises(ValueError, match="at least one image or text"):
        evaluate.row_statistics(made("relu/L"), [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and run folders of a translation and of a language model that have learned nothing."""
    folder = tmp_path_factory.mktemp("text")
    data = write_splits(folder / "data", test=3)
    tokenizer = Tokenizer.train(corpus(12), 330)
    for name, task, phi, encoder in (
        ("[b]translation", "translate", "relu/L", 1),
        ("language", "language", "softmax", 0),
    ):
        model = made(phi, encoder, 1, 330)
        languages = ("en", "es") if encoder else ("es",)
        config = TextConfig(model=model.config, task=task, data=data, languages=languages)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(to_json(replace(config, batch_size=64)))
        models.save(model, folder / name / "model")
        for place in (folder / name, folder / name / "model"):
            tokenizer.save(place / models.hub.VOCABULARY)
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


def rows(*words: object) -> int:
    return nomax("rows", *words)


def test_the_command_shows_every_attention_and_writes_beside_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "[b]translation"
    assert rows(run, "--texts", 5) == 0
    out = capsys.readouterr().out
    assert "[b]translation (relu/L)" in out
    assert f"Written: {run}/rows.json, {run}/rows.svg" in out
    for name in ("encoder", "decoder", "decoder, to the source"):
        assert any(line.split("  ")[1] == name for line in out.splitlines() if line.startswith("  ")), name
    assert list(tmp_path.iterdir()) == []
    tokenizer = Tokenizer.load(run / models.hub.VOCABULARY)
    examples = sentences(corpus(3, seed=2), tokenizer, longest=64, too_long="split")
    chosen = [examples[i] for i in (0, 7, 14, 22, 29)]
    expected = evaluate.row_statistics(evaluate.load_text(run).model, chosen)
    statistics = json.loads((run / "rows.json").read_text())["[b]translation (relu/L)"]
    assert [row["row_sum"] for row in statistics] == pytest.approx([row.row_sum for row in expected])
    assert [row["part"] for row in statistics] == [row.part for row in expected]
    svg = (run / "rows.svg").read_text()
    for part in ("encoder", "decoder", "source"):
        assert f"[b]translation (relu/L), {part}" in svg


def test_files_saved_models_and_models_of_both_kinds_are_taken(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("new.en").write_text("the king sees\nthe river\n")
    Path("new.es").write_text("rey ve\nrío\n")
    assert rows(folder / "[b]translation", "--data", "new.en,new.es", "--output", "one", "--heads") == 0
    assert rows(folder / "language", "--data", "new.es", "--output", "two") == 0
    assert rows(folder / "language" / "model", "--data", "new.es", "--output", "three") == 0
    (own,), (saved,) = (json.loads(Path(place, "rows.json").read_text()).values() for place in ("two", "three"))
    assert own == saved
    assert {row["part"] for row in own} == {"decoder"}
    vit = models.ViT("mu/7", num_classes=10, image_size=28, channels=1)
    models.save(vit, "vit")
    capsys.readouterr()
    assert rows("vit", "--data", "fashion-mnist-small", "--smoke") == 0
    assert rows(folder / "language", folder / "[b]translation", "--smoke", "--output", "both") == 0
    out = capsys.readouterr().out
    assert "Written: vit/rows.json, vit/rows.svg" in out
    assert len(json.loads(Path("both/rows.json").read_text())) == 2


def test_only_its_own_files_are_replaced_and_that_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "language"
    assert rows(run, "--smoke", "--output", "mine") == 0
    assert "Written: mine/rows.json" in capsys.readouterr().out
    assert rows(run, "--smoke", "--output", "mine") == 0
    assert "Written, in place of an earlier one: mine/rows.json" in capsys.readouterr().out
    for name in ("rows.json", "rows.svg"):
        Path("theirs").mkdir(exist_ok=True)
        Path("theirs", name).write_text("precious")
        assert rows(run, "--smoke", "--output", "theirs") == 2
        assert f"theirs/{name} is there, and nomax rows did not write it" in capsys.readouterr().err
        assert Path("theirs", name).read_text() == "precious"
        Path("theirs", name).unlink()
    assert not list(Path("theirs").iterdir())


def test_mistakes_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a file").write_text("")
    for words, message in (
        ((folder / "language", "--texts", "0"), "--texts 0 must be at least 1"),
        ((folder / "language" / "model",), "give one with --data"),
        ((folder / "[b]translation", "--data", "none.en,none.es"), "there is no such file"),
        ((folder / "language", "--output", "a file"), "--output a file/rows.json: "),
    ):
        assert rows(*words) == 2
        assert message in capsys.readouterr().err
    assert rows(folder / "language", "--smoke", "--output", "/proc/nomax") > 0
    assert "/proc/nomax" in capsys.readouterr().err
    assert nomax("maps", folder / "language") == 2
    assert "is a text model, not an image model: nomax evaluate, nomax rows and nomax generate take it" in (
        capsys.readouterr().err
    )
    assert nomax("maps", folder / "[b]translation") == 2
    assert "nomax translate take it" in capsys.readouterr().err
