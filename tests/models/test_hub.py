"""Models on disk: what was saved is what is loaded, and what does not fit is named."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nomax import models
from nomax.models import ReLUFormer, ViT

SMALL = {"image_size": (8, 12), "num_classes": 5, "phi": "2*relu/L^0.5", "gate": "silu", "learned_alpha": "head"}


def model(**changes: object) -> ViT:
    made = ViT("mu/4", **{**SMALL, **changes})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_is_the_saved_one_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = model(pool="tok", rep_size=True).to(dtype)
    models.save(saved, tmp_path / "new" / "folder")
    loaded = models.load(tmp_path / "new" / "folder")
    assert loaded.config == saved.config
    assert not loaded.training
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert loaded.state_dict()[name].dtype == dtype
    x = torch.randn(2, 3, 8, 12, dtype=dtype)
    assert torch.equal(loaded(x), saved.eval()(x))
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]


def test_equal_models_make_equal_files_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "vocabulary.model").write_bytes(b"some")  # noted in the header
    program = "import sys, torch; from nomax import models; torch.manual_seed(0); "
    program += "models.save(models.ReLUFormer(9, dim=4, heads=2, slots=3, max_length=4), sys.argv[1])"
    digests = set()
    for _ in range(4):
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
        digests.add(hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"vocabulary.model": hashlib.sha256(b"some").hexdigest()}
    assert models.load(tmp_path).config.dim == 4


def test_the_config_names_phi_and_every_field(tmp_path: Path) -> None:
    models.save(model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "nomax-vit"
    assert config["phi"] == "2*relu/L^0.5"
    assert config["image_size"] == [8, 12]
    assert {"variant", "num_classes", "qk_norm", "gelu", "norm"} <= config.keys()


def test_the_card_tells_phi_data_recipe_accuracy_and_command_and_its_header_cannot_be_broken(tmp_path: Path) -> None:
    command = "nomax train vit --phi 'relu/L' | tee log"
    card = {"data": "cifar10\n---\nevil: true", "recipe": "small", "accuracy": 0.87654321, "command": command}
    models.save(model(), tmp_path, card)
    text = (tmp_path / "README.md").read_text()
    header = text.split("---\n")[1]
    assert json.loads(header.splitlines()[1].partition(": ")[2])[0] == "nomax"
    assert "library_name" in header
    assert "evil" not in header
    for told in (
        "`2*relu/L^0.5`",
        "| recipe | small |",
        "| accuracy | 0.8765 |",
        "cifar10 --- evil: true",
        "\\| tee log`",
    ):
        assert told in text


def test_a_failure_while_saving_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.save(model(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        models.save(model(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("classes", "task"), [(5, "image-classification"), (0, "image-feature-extraction")])
def test_the_card_of_a_model_without_a_head_does_not_promise_classes(tmp_path: Path, classes: int, task: str) -> None:
    models.save(model(num_classes=classes), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert f'pipeline_tag: "{task}"\n' in text
    assert ("nomax predict" in text) == bool(classes)


def test_a_model_that_an_earlier_version_saved_tells_of_its_vocabulary(tmp_path: Path) -> None:
    models.save(model(), tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt", "vocabulary.model": "a digest"})
    assert models.hub.vocabulary_digest(tmp_path) == "a digest"
    models.load(tmp_path)


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    models.save(model(), tmp_path)
    models.save(model(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def edited(folder: Path, **changes: object) -> Path:
    models.save(model(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ph": "softmax"}, "unknown keys: ph; did you mean phi"),
        ({"model_type": "bert"}, "model_type='bert' is unknown; nomax reads nomax-vit"),
        ({"pool": "map"}, "config.json: pool='map' must be"),
        ({"phi": "rellu/L"}, "did you mean 'relu/L'"),
        ({"variant": "mu/2"}, r"of another shape: embedding.weight is \[32, 3, 4, 4\], the model's is \[32, 3, 2, 2\]"),
        ({"gate": None}, r"unexpected: blocks.0.attention.gate.weight \[32, 32\]"),
        ({"qk_norm": True}, r"missing: blocks.0.attention.query_norm.weight \[16\]"),
    ],
)
def test_a_config_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.load(edited(tmp_path, **changes))


ABSURD = [
    ("vit", {"variant": "e/4"}, r"asks for a model of at least 3,\d+,\d+,\d+ numbers, but .*safetensors has [\d,]+:"),
    ("vit", {"num_classes": 10**10}, "asks for a model of at least 320,0"),
    ("vit", {"image_size": 4 * 10**6}, "asks for a model of at least 32,0"),
    ("vit", {"image_size": 4 * 10**6, "posemb": "sincos2d"}, "no more than 268,435,456 may be fixed positions"),
    ("vit", {"channels": 10**40}, "asks for a model of at least"),
    ("text", {"decoder_layers": 10**7}, "decoder_layers=10000000 must be at most 1,000"),
    ("text", {"encoder_layers": 10**7}, "encoder_layers=10000000 must be at most 1,000"),
    ("text", {"vocabulary": 10**12}, "asks for a model of at least"),
    ("text", {"slots": 10**11}, "asks for a model of at least"),
    ("text", {"dim": 10**8}, "asks for a model of at least"),
    ("text", {"max_length": 10**11}, "may be fixed positions"),
]
LOAD_WITHIN_A_GIBIBYTE = """
import resource, sys
from nomax import models
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, now + 2**30))
for folder in sys.argv[1:]:
    try:
        models.load(folder)
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory by Linux's means")
def test_a_config_of_absurd_sizes_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(ABSURD))]
    for folder, (kind, changes, _) in zip(folders, ABSURD, strict=True):
        models.save(model() if kind == "vit" else models.ReLUFormer(9, dim=4, heads=2, slots=3, max_length=4), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
    command = [sys.executable, "-c", LOAD_WITHIN_A_GIBIBYTE, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for said, (_, _, message) in zip(done.stdout.splitlines(), ABSURD, strict=True):
        assert re.search(message, said)


def test_the_sizes_of_a_config_bound_those_of_its_model() -> None:
    vits = (
        {},
        {"pool": "tok", "rep_size": 9},
        {"posemb": "sincos2d", "gate": None},
        {"rep_size": True, "num_classes": 0},
    )
    texts = ({}, {"encoder_layers": 0}, {"positions": "rotary"}, {"joined_norm": "rela", "memory_norm": True})
    made = [ViT("mu/4", **{**SMALL, **changes}) for changes in vits]
    made += [models.ReLUFormer(300, dim=64, slots=32, max_length=9, **changes) for changes in texts]
    for one in made:
        numbers = sum(parameter.numel() for parameter in one.parameters())
        assert 0.9 * numbers < one.config.matrix_numbers < numbers
        assert one.config.fixed_numbers == sum(buffer.numel() for buffer in one.buffers())


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"model_type": []}', '{"model_type": {}}', "NaN"])
def test_a_config_that_is_no_config_is_refused_in_words(tmp_path: Path, text: str) -> None:
    models.save(model(), tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json"):
        models.load(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400], ids=["nan", "inf", "beyond any float"])
def test_a_number_in_a_config_is_finite(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match=r"head_bias=.* must be a finite number"):
        models.load(edited(tmp_path, head_bias=value))


def test_weights_that_are_no_numbers_with_a_point_are_named(tmp_path: Path) -> None:
    models.save(model(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["head.bias"] = tensors["head.bias"].int()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not floating-point: head.bias is torch.int32"):
        models.load(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        models.load(tmp_path)
    models.save(model(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    for read in (models.load, models.hub.vocabulary_digest):
        with pytest.raises(ValueError, match=r"model.safetensors cannot be read"):
            read(tmp_path)
    weights.unlink()
    for read in (models.load, models.hub.vocabulary_digest):
        with pytest.raises(FileNotFoundError, match=r"no model.safetensors"):
            read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is damaged"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="model_type=None"):
        models.load(tmp_path)


def test_a_name_that_is_no_folder_is_fetched_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, asked = model(), []
    models.save(saved, tmp_path)

    def snapshot_download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        if name != "someone/vit":
            raise OSError("no network\nsecond line")
        return str(tmp_path)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    loaded = models.load("someone/vit", revision="v2")
    assert torch.equal(loaded.head.weight, saved.head.weight)
    assert asked == [("someone/vit", "v2", ["config.json", "model.safetensors", "README.md", "vocabulary.model"])]
    with pytest.raises(FileNotFoundError, match=r"no folder 'runs/vit', and no model .* hub: no network$"):
        models.load("runs/vit")
    with pytest.raises(FileNotFoundError, match=r"no folder '../vit', nor is it the id"):
        models.load("../vit")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        models.load("someone/vit")


def test_only_our_models_are_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model must be one of ViT, ReLUFormer, got a Linear"):
        models.save(torch.nn.Linear(2, 2), tmp_path)


KINDS = {
    "ViT": lambda: model(),
    "ReLUFormer": lambda: ReLUFormer(9, dim=4, heads=2, slots=3, max_length=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_have_the_methods_of_the_hub(kind: str, tmp_path: Path) -> None:
    saved = KINDS[kind]()
    saved.save_pretrained(tmp_path / "mine", {"recipe": "my own"})
    models.save(saved, tmp_path / "same", {"recipe": "my own"})
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / "mine" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    loaded = type(saved).from_pretrained(tmp_path / "mine")
    assert type(loaded) is type(saved)
    assert loaded.config == saved.config
    assert not loaded.training
    torch.testing.assert_close(loaded.state_dict(), saved.state_dict(), rtol=0, atol=0)
    other = {"ViT": ReLUFormer, "ReLUFormer": ViT}[kind]
    with pytest.raises(TypeError, match=f"is a {kind}, not a {other.__name__}: {kind}.from_pretrained reads it"):
        other.from_pretrained(tmp_path / "mine")


def test_from_pretrained_fetches_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    saved, asked = model(), []
    models.save(saved, tmp_path)

    def snapshot_download(name: str, **options: object) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    loaded = ViT.from_pretrained("someone/vit", revision="v2", token="secret", cache_dir="here", local_files_only=True)
    assert torch.equal(loaded.head.weight, saved.head.weight)
    ((name, options),) = asked
    assert name == "someone/vit"
    assert options.pop("allow_patterns") == ["config.json", "model.safetensors", "README.md", "vocabulary.model"]
    assert options == {"revision": "v2", "token": "secret", "cache_dir": "here", "local_files_only": True}
    with pytest.raises(TypeError, match="unexpected keyword argument 'revisoin'"):
        ViT.from_pretrained(tmp_path, revisoin="v2")


def test_push_to_hub_uploads_what_from_pretrained_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    done: list[tuple[str, object]] = []

    def create_repo(name: str, **options: object) -> types.SimpleNamespace:
        done.append(("repository", (name, options)))
        return types.SimpleNamespace(repo_id=f"me/{name}")

    def create_branch(name: str, **options: object) -> None:
        done.append(("branch", (name, options["branch"])))

    def upload_folder(*, repo_id: str, folder_path: str, **options: object) -> str:
        done.append(("upload", (repo_id, options)))
        shutil.copytree(folder_path, tmp_path / repo_id)
        return f"https://hub/{repo_id}/commit/1"

    for function in (create_repo, create_branch, upload_folder):
        monkeypatch.setattr(hub, function.__name__, function)
    (tmp_path / "words").write_bytes(b"some")
    saved = KINDS["ReLUFormer"]()
    how = {"private": True, "token": "secret", "revision": "try", "vocabulary": tmp_path / "words"}
    assert saved.push_to_hub("mine", {"data": "verses"}, **how) == "https://hub/me/mine/commit/1"
    assert [name for name, _ in done] == ["repository", "branch", "upload"]
    assert done[0][1] == ("mine", {"private": True, "token": "secret", "exist_ok": True})
    assert done[1][1] == ("me/mine", "try")
    message = {"commit_message": "Upload a model of nomax", "create_pr": False, "revision": "try", "token": "secret"}
    assert done[2][1] == ("me/mine", message)
    there = tmp_path / "me" / "mine"
    assert sorted(path.name for path in there.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "vocabulary.model",
    ]
    assert "| data | verses |" in (there / "README.md").read_text()
    torch.testing.assert_close(ReLUFormer.from_pretrained(there).state_dict(), saved.state_dict(), rtol=0, atol=0)
    assert models.hub.vocabulary_digest(there) == hashlib.sha256(b"some").hexdigest()

    def refused(*_: object, **__: object) -> None:
        raise OSError("401 Client Error\nlong story")

    monkeypatch.setattr(hub, "create_repo", refused)
    with pytest.raises(ConnectionError, match=r"mine was not pushed to the Hugging Face hub: 401 Client Error$"):
        saved.push_to_hub("mine")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        saved.push_to_hub("mine")


def test_offline_the_message_names_the_variable_and_nothing_imports_the_hub_before_it_is_needed(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    program = """
import sys, nomax, nomax.models, nomax.evaluate, nomax.train
assert "huggingface_hub" not in sys.modules
model = nomax.models.ViT("mu/4", num_classes=2, image_size=8)
for call in (lambda: nomax.models.ViT.from_pretrained("someone/vit"), lambda: model.push_to_hub("someone/vit")):
    try:
        call()
    except OSError as error:
        print(error)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    assert len(told) == 2
    for line, start in zip(told, ("there is no folder 'someone/vit'", "someone/vit was not pushed"), strict=True):
        assert line.startswith(start)
        assert "HF_HUB_OFFLINE is set" in line
