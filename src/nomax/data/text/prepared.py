"""What the readers of the named sets share: writing the splits."""

from collections.abc import Iterable
from typing import Any

from nomax.data.arrays import Job
from nomax.data.text.corpus import Document, write

SPLITS = ("train", "valid", "test")


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
