"""A small corpus, and models small enough for it."""

from pathlib import Path

from text_corpora import corpus

from nomax.data.text.corpus import write_jsonl

SMALL = {"tensorboard": False, "threads": 1, "vocabulary": 330, "batch_size": 256, "warmup": 1, "max_length": 128}
SMALL |= {"dim": 16, "heads": 2, "decoder_layers": 1, "slots": 32, "dropout": 0.1}
TRANSLATE = {**SMALL, "encoder_layers": 1}
LANGUAGE = {name: value for name, value in SMALL.items() if name != "max_length"} | {"documents": 64}


def tales(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, documents) in enumerate({"train": 12, "valid": 3, "test": 2}.items()):
        text = corpus(documents, seed=seed)
        write_jsonl(folder / f"{split}.jsonl", text.documents, text.languages)
    return str(folder)
