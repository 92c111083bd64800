"""The job of a reader: the packages that it gets, and the arrays or documents that it writes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nomax.data.registry import TEXT_SPLITS

if TYPE_CHECKING:
    from nomax.data.text.corpus import Document

# Called with what is being done, how much of it is done, how much there is, and the unit: "bytes" or "images".
Report = Callable[[str, int, int, str], None]


def silent(step: str, done: int, total: int, unit: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Job:
    """The packages that a reader prepares, and the folders that it writes to."""

    name: str
    packages: Mapping[str, Path]
    """Verified package files, by package name."""
    folder: Path
    """The prepared files go here; the folder is new and empty."""
    scratch: Path
    """Files here survive being killed, for the next attempt to go on from."""
    report: Report = silent

    def write_images(self, images: npt.NDArray[np.uint8], labels: npt.ArrayLike) -> None:
        """Write the two arrays; images go to the disk a part at a time, so they may be mapped from a file."""
        target = np.lib.format.open_memmap(self.folder / "images.npy", "w+", np.uint8, images.shape)
        for start in range(0, len(images), 4096):
            target[start : start + 4096] = images[start : start + 4096]
        target.flush()
        np.save(self.folder / "labels.npy", np.asarray(labels, np.int64))

    def write_documents(
        self,
        documents: Iterable[tuple[str, "Document"]],
        languages: tuple[str, str],
        *,
        dropped: Mapping[str, int],
        rule: str,
    ) -> dict[str, Any]:
        """Write each document into the file of its split, and return what meta.json says about them.

        A split keeps the order in which its documents come. `dropped` counts what was left out, by reason; `rule` says
        how the documents were split.
        """
        from nomax.data.text.corpus import write_jsonl

        splits: dict[str, list[Document]] = {split: [] for split in TEXT_SPLITS}
        for split, document in documents:
            splits[split].append(document)
        for split, chosen in splits.items():
            if not chosen:
                raise ValueError(f"{self.name}: the packages hold no documents for the split {split!r}.")
            write_jsonl(self.folder / f"{split}.jsonl", chosen, languages)
        return {
            "languages": list(languages),
            "counts": {split: sum(len(document.pairs) for document in chosen) for split, chosen in splits.items()},
            "documents": {split: len(chosen) for split, chosen in splits.items()},
            "dropped": dict(dropped),
            "rule": rule,
        }
