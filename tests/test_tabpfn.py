"""tools/recover_tabpfn.py: the model attends as TabPFN does, made-up tables depend on their address, results resume."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
specification = importlib.util.spec_from_file_location("recover_tabpfn", ROOT / "tools" / "recover_tabpfn.py")
tool = importlib.util.module_from_spec(specification)
specification.loader.exec_module(tool)


@pytest.fixture
def small(monkeypatch):
    """A model of TabPFN's form, but of seconds."""
    for name, value in {"WIDTH": 16, "HEADS": 2, "HIDDEN": 32, "LAYERS": 2}.items():
        monkeypatch.setattr(tool, name, value)
    return tool.TabPFN().eval()


def test_the_names_and_shapes_are_those_of_the_checkpoint():
    with torch.device("meta"):
        shapes = {name: list(x.shape) for name, x in tool.TabPFN().state_dict().items()}
    assert shapes["encoder.weight"] == [512, 100]
    assert shapes["transformer_encoder.layers.11.self_attn.in_proj_weight"] == [1536, 512]
    parameters = sum(np.prod(shape) for shape in shapes.values())
    assert parameters == 25_821_716 - 10  # without the weights of the loss that it was trained with


def test_rows_see_the_labelled_rows_and_nothing_else(small):
    batch = tool.made_up_batch(200, 0, 0, labelled=20)
    whole = tool.called(small, batch)
    assert (whole.argmax(-1) < batch.classes[:, None]).all()
    # Each row that is asked about gets the same answer when it is alone.
    alone = small(torch.cat([batch.features[:, :20], batch.features[:, 23:24]], 1), batch.labels)
    torch.testing.assert_close(alone[:, 0], small(batch.features, batch.labels)[:, 3])
    changed = batch.labels.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 2
    assert not torch.allclose(small(batch.features, changed), small(batch.features, batch.labels))


def test_the_encoder_layer_is_torchs_own_where_all_rows_have_labels(small):
    layer, rows = small.transformer_encoder["layers"][0], torch.randn(2, 7, 16)
    own = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0, activation="gelu", batch_first=True)
    own.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(rows, 7), own.train()(rows))


def test_features_are_normalised_by_the_rows_with_labels():
    table = np.random.default_rng(0).normal(3, 5, (40, 6))
    table[:, 2] = 1  # constant, so it says nothing
    features = tool.prepared(table, 30)
    assert features.shape == (40, 100)
    used = features[:30, :5] * 5 / 100
    torch.testing.assert_close(used.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(used.std(0), torch.ones(5), atol=1e-5, rtol=0)
    assert not features[:, 5:].any()
    table[30:] = 1e9
    torch.testing.assert_close(tool.prepared(table, 30)[:30], features[:30])


def test_made_up_tables_depend_on_their_address_alone():
    one, again, other = (
        tool.made_up_batch(300, 0, 0, 7),
        tool.made_up_batch(300, 0, 0, 7),
        tool.made_up_batch(300, 0, 0, 8),
    )
    assert torch.equal(one.features, again.features)
    assert torch.equal(one.labels, again.labels)
    assert one.features.shape != other.features.shape or not torch.equal(one.features, other.features)
    for batch in (one, other):
        assert (batch.labels < batch.classes[:, None]).all()
        assert torch.isfinite(batch.features).all()


def test_results_are_kept_and_not_computed_again(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "load", lambda: small)
    monkeypatch.setattr(tool, "TABLES", {"iris": (30, 20)})
    options = tool.Options(out=tmp_path, phi=("relu/L",), layers=(1, 2), steps=2, rows=96, validation=1)
    tool.Study(tool.replace(options, only_calibrate=True), tool.Console()).run()
    before = json.loads((tmp_path / "tabpfn.json").read_text())
    assert [list(run["stages"]) for run in before["runs"].values()] == [["calibrated"]] * 2
    tool.Study(options, tool.Console()).run()
    result = json.loads((tmp_path / "tabpfn.json").read_text())
    for name, run in result["runs"].items():
        assert run["stages"]["calibrated"] == before["runs"][name]["stages"]["calibrated"]
    assert list(result["runs"]) == ["relu/L, 1", "relu/L, 2"]
    assert set(result["harm"]) == {"0", "1"}
    assert result["runs"]["relu/L, 2"]["layers"] == [0, 1]
    assert [len(each["losses"]) for each in result["runs"].values()] == [2, 2]
    assert (tmp_path / "tabpfn.svg").read_bytes().startswith(b"<?xml")
    assert (tmp_path / "tabpfn.md").read_text() == tool.table(result)
    monkeypatch.setattr(tool.nomax, "distil", None)  # nothing is left to do
    tool.Study(options, tool.Console()).run()
    with pytest.raises(ValueError, match="has results of other settings"):
        tool.Study(tool.replace(options, steps=3), tool.Console())


def test_a_missing_checkpoint_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NOMAX_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nomax data get tabpfn"):
        tool.load()


def test_the_table_on_the_page_is_that_of_the_result():
    folder = ROOT / "results" / "convert" / "tabpfn"
    text = tool.table(json.loads((folder / "tabpfn.json").read_text()))
    assert text == (folder / "tabpfn.md").read_text()
    assert text.partition("-->\n\n")[2] in (ROOT / "docs" / "recover-tabpfn.md").read_text()
