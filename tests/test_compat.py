"""Optional packages: imported late, mended where needed, and missed in words."""

import importlib.util
import subprocess
import sys

import pytest

from nomax import _compat

LATE = (
    "torchvision",
    "timm",
    "PIL",
    "matplotlib",
    "huggingface_hub",
    "pydantic",
    "tensorboard",
    "entmax",
    "sentencepiece",
)


def test_importing_nomax_imports_no_optional_package() -> None:
    program = f"import sys, nomax, nomax._compat; print([name for name in {LATE!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_torchvision_and_timm_import_without_a_warning_in_a_fresh_process() -> None:
    program = (
        "from nomax import _compat; _compat.timm(); import torch, torchvision.datasets;"
        "from torchvision.transforms import v2;"
        "print(v2.functional.resize(torch.zeros(3, 8, 8), [4, 6]).shape)"
    )
    process = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "torch.Size([3, 4, 6])"


def test_a_model_of_timm_is_made_and_converted_in_a_fresh_process() -> None:
    program = (
        "import nomax; from nomax import models;"
        "model = nomax.timm_model('vit_tiny_patch16_224', img_size=48, num_classes=3);"
        "print(models.from_timm(model).config.variant)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "Ti/16"


def test_a_second_call_returns_the_same_package() -> None:
    assert _compat.torchvision() is _compat.torchvision() is sys.modules["torchvision"]


@pytest.mark.parametrize("name", ["torchvision", "timm"])
def test_a_missing_package_is_answered_with_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=f"{name}: pip install {name}"):
        getattr(_compat, name)()
