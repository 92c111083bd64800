"""What the readers of the named sets share: which split a document belongs to, and writing the splits."""

import hashlib
from collections.abc import Iterable
from typing import Any

from nomax.data.arrays import Job
from nomax.data.text.corpus import Document, write

SPLITS = ("train", "valid", "test")
_VALID, _TEST = 5, 5  # per cent


def split_of(key: str) -> str:
    """The split of everything with this key: a hash of the key decides, so it never depends on what else there is."""
    place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 100
    if place < _TEST:
        return "test"
    return "valid" if place < _TEST + _VALID else "train"


def write_splits(
    job: Job, documents: Iterable[tuple[str, Document]], languages: tuple[str, str], dropped: dict[str, int], rule: str
) -> dict[str, Any]:
    """Write each document into the file of its split, and return what meta.json says about them.

    A split keeps the order in which its documents come. `dropped` counts what was left out, by reason.
    """
    splits: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for split, document in documents:
        splits[split].append(document)
    for split, chosen in splits.items():
        if not chosen:
            raise ValueError(f"{job.name}: the packages hold no documents for the split {split!r}.")
        write(job.folder / f"{split}.jsonl", chosen, languages)
    return {
        "languages": list(languages),
        "counts": {split: sum(len(document.pairs) for document in chosen) for split, chosen in splits.items()},
        "documents": {split: len(chosen) for split, chosen in splits.items()},
        "dropped": dropped,
        "rule": rule,
    }
