"""What the tests of evaluation share: the command line, photos of three colours, a corpus on disk."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from text_corpora import corpus

from nomax.cli import main
from nomax.data.text.corpus import write_jsonl

COLOURS = {"blue [b]": (0, 0, 250), "green": (0, 250, 0), "red": (250, 0, 0)}
# Too few steps to learn anything, but the head is no longer zero.
SMALL: dict[str, Any] = {"tensorboard": False, "threads": 1, "batch_size": 8, "model": "mu/4", "image_size": 8}
SMALL |= {"steps": 8, "warmup": 1, "lr": 1e-2}


def nomax(command: str, *arguments: object) -> int:
    """Do what `nomax COMMAND ARGUMENTS` does."""
    return main([command, *map(str, arguments)])


def picture(path: Path, colour: tuple[int, int, int], seed: int, size: tuple[int, int] = (13, 9)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-60, 60, (size[1], size[0], 3))
    Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)).save(path)
    return path


def pictures(folder: Path, classes: dict[str, tuple[int, int, int]] = COLOURS) -> Path:
    for split in ("train", "test"):
        for name, colour in classes.items():
            for number in range(6):
                picture(folder / split / name / f"{number}.png", colour, number)
    return folder


def write_splits(folder: Path, test: int = 2) -> str:
    """Write a corpus of 12, 2 and so many documents, and return its folder as --data takes it."""
    folder.mkdir()
    for seed, (split, documents) in enumerate({"train": 12, "valid": 2, "test": test}.items()):
        text = corpus(documents, seed=seed)
        write_jsonl(folder / f"{split}.jsonl", text.documents, text.languages)
    return str(folder)
