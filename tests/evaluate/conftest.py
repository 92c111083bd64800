import pytest
from evaluate_helpers import SMALL, pictures, write_splits

from nomax.train.text.command import Language, Translate
from nomax.train.vision import command as vit

TEXT = {"vocabulary": 330, "dim": 32, "heads": 2, "decoder_layers": 1, "slots": 64, "tensorboard": False, "threads": 1}
TRANSLATE = {**TEXT, "encoder_layers": 1, "batch_size": 1024, "dropout": 0.0, "checkpoint_every": 1000}


@pytest.fixture
def in_folder(monkeypatch, tmp_path):
    """Run a test in a folder of its own, in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    return pictures(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory, photos):
    """A run of these photos."""
    folder = tmp_path_factory.mktemp("image-runs") / "trained"
    assert vit.run(vit.Options(data=str(photos), out=folder, **SMALL)) == 0
    return folder


@pytest.fixture(scope="session")
def text_runs(tmp_path_factory):
    """A run of sentences that has learned something, one of documents and one of language that have not."""
    folder = tmp_path_factory.mktemp("text-runs")
    data = {"data": write_splits(folder / "data")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOMAX_DATA", str(folder / "cache"))
        usual = {"lr": 1e-2, "warmup": 10, **data, **TRANSLATE}
        options = Translate(out=folder / "sentences", steps=100, max_length=64, **usual)
        assert options.run() == 0
        options = Translate(out=folder / "documents", steps=25, documents=80, **usual)
        assert options.run() == 0
        assert Language(out=folder / "language", steps=3, warmup=1, **data, **TEXT).run() == 0
    return folder
