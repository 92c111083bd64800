"""`nomax data info`: describe a data set of images or text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import numpy.typing as npt
import tyro
from rich.text import Text

from nomax._files import atomic
from nomax.console import Console, Table
from nomax.data import text
from nomax.data.load import load, paths_of
from nomax.data.registry import IMAGES, TEXT_SPLITS, TEXTS, cache_folder, entry
from nomax.data.source import ArraySource, Source, read_meta
from nomax.data.text.corpus import Corpus, language_of
from nomax.data.text.load import has_splits

if TYPE_CHECKING:
    from PIL import Image

SPLITS = ("train", "test", "val")
MOST_DECODED = 500  # images that are decoded to learn sizes and pixel statistics, where they are not in one array


@dataclass(frozen=True)
class Options:
    """Describe a data set: images by split and class, sizes, pixel statistics, licence, and where it lies.

    Of text: pairs, documents and words by split.
    """

    data: Annotated[str, tyro.conf.arg(metavar="DATA"), tyro.conf.Positional]
    """A name of `nomax data list`, a folder, shards, torchvision:NAME, hf:NAME, JSONL documents, or texts as
    FILE,FILE."""
    split: str | None = None
    """Only this split; by default those of train, test and val that exist."""
    held_out: float = 0.0
    """For images without a test split: the share to hold out as one, as in `nomax train vit`."""
    languages: tuple[str, str] | None = None
    """For text: source and target, if the data does not name them or has more than two."""
    sheet: Path | None = None
    """Write a sheet of small pictures into this PNG file: a class in each row."""
    on_error: Literal["raise", "skip"] = "raise"
    """Stop at unreadable images of a folder or of shards, or leave them out."""


def run(options: Options) -> int:
    """Print the facts and the table, and write the sheet."""
    console = Console()
    sources: dict[str, Source] = {}
    if _is_text(options.data):
        columns = {split: _text_rows(corpus) for split, corpus in _corpora(options).items()}
    else:
        sources = _sources(options)
        columns = {split: _image_rows(source, options.on_error) for split, source in sources.items()}
    for title, fact in _facts(options.data).items():
        console.print(Text.assemble((title, "bold"), f" {fact}"))
    table = Table("", *columns)
    for title in dict.fromkeys(title for rows in columns.values() for title in rows):
        table.add_row(title, *(rows.get(title, "") for rows in columns.values()))
    console.print(table)
    if options.sheet and sources:
        write_sheet(next(iter(sources.values())), options.sheet, on_error=options.on_error)
        console.print(f"Written: {options.sheet}")
    return 0


def _facts(data: str) -> dict[str, str]:
    if data not in IMAGES and data not in TEXTS:
        return {"data": data}
    known = entry(data)
    facts = {known.name: known.summary, "licence": known.licence}
    if not known.packages:
        return facts
    folder = cache_folder() / known.name
    meta = read_meta(folder)
    facts["from"] = ", ".join(f"{package['name']} {package['version']}" for package in meta["packages"])
    facts["in"] = str(folder)
    if data in TEXTS:
        facts["languages"] = " and ".join(meta["languages"])
        facts["split"] = meta["rule"]
        facts["left out"] = "; ".join(f"{count:,} {reason}" for reason, count in meta["dropped"].items()) or "nothing"
    if (folder / "ATTRIBUTION.txt").exists():
        facts["authors and licences"] = str(folder / "ATTRIBUTION.txt")
    if "subset" in meta:
        facts["subset"] = f"{len(meta['subset']):,} classes, {meta['subset_rule']}"
    return facts


# Text


def _is_text(data: str) -> bool:
    """Return whether a name or path is text: a named set, JSONL documents, a pair of files, or a folder of such."""
    path, given = Path(data).expanduser(), paths_of(data)
    pair = len(given) == 2 and any(Path(each).expanduser().is_file() for each in given)
    documents = path.suffix == ".jsonl" and path.is_file()
    return data in TEXTS or pair or documents or any(_has_text(path, split) for split in TEXT_SPLITS)


def _has_text(folder: Path, split: str) -> bool:
    """Return whether a folder has JSONL documents or files in two languages for a split."""
    languages = {language_of(file) for file in folder.glob(f"{split}.*")} - {None}
    return (folder / f"{split}.jsonl").is_file() or len(languages) > 1


def _corpora(options: Options) -> dict[str, Corpus]:
    path = Path(options.data).expanduser()
    if options.split:
        splits = [options.split]
    elif options.data not in TEXTS and path.is_dir():
        splits = [split for split in TEXT_SPLITS if _has_text(path, split)]
    else:
        splits = list(TEXT_SPLITS) if has_splits(options.data) else ["all"]
    return {split: text.load(options.data, split, languages=options.languages) for split in splits}


def _text_rows(corpus: Corpus) -> dict[str, str]:
    source, target = corpus.languages
    words = [[len(segment.split()) for segment in side] for side in zip(*corpus.pairs(), strict=True)]
    sizes = [sum(len(pair.source.split()) for pair in document.pairs) for document in corpus.documents]
    numbers = {
        "documents": len(corpus.documents),
        "pairs": len(corpus),
        f"words in {source}": sum(words[0]),
        f"words in {target}": sum(words[1]),
        f"{source} words of the middle document": median(sizes),
        "… of the longest": max(sizes),
    }
    return {title: f"{number:,.10g}" for title, number in numbers.items()}


# Images


def _sources(options: Options) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    refused: Exception | None = None
    named = IMAGES[options.data].counts if options.data in IMAGES else SPLITS
    for split in [options.split] if options.split else named:
        try:
            source = load(options.data, split, on_error=options.on_error, held_out=options.held_out)
        except (ValueError, FileNotFoundError) as error:
            refused = refused or error
            continue
        # A set with one held-out split has it under both names.
        if not any(len(source) == len(other) and source.name(0) == other.name(0) for other in sources.values()):
            sources[split] = source
    if not sources and refused:
        raise refused
    return sources


@dataclass(frozen=True)
class PixelStatistics:
    """The sizes of images, and the mean and standard deviation of their pixels, 0 to 1, per channel."""

    sizes: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    decoded: int
    """The number of images that these were taken from."""


def _image_rows(source: Source, on_error: str) -> dict[str, str]:
    if not len(source):
        raise ValueError("there are no images to describe.")
    per_class = np.bincount(source.labels, minlength=len(source.classes))
    pixels = pixel_statistics(source, on_error)
    rows = {
        "images": f"{len(source):,}",
        "classes": f"{len(source.classes):,}",
        "images of the smallest class": f"{per_class.min():,}",
        "… of the middle one": f"{np.median(per_class):,g}",
        "… of the largest": f"{per_class.max():,}",
        "size": pixels.sizes,
        "mean of the pixels": " ".join(f"{value:.4f}" for value in pixels.mean),
        "standard deviation": " ".join(f"{value:.4f}" for value in pixels.std),
    }
    return rows | ({"taken from": f"{pixels.decoded} images"} if pixels.decoded < len(source) else {})


def pixel_statistics(source: Source, on_error: str = "raise") -> PixelStatistics:
    """Measure the pixels: of all images that lie in an array, else of a sample taken evenly over them.

    With on_error="skip", images that cannot be read are left out of the sample.
    """
    sizes: set[tuple[int, int]] = set()
    modes: set[str] = set()
    frequencies = np.zeros((3, 256))  # of every value in every channel: sums of them are exact
    decoded = 0
    for pixels in _pixels(source, on_error):
        decoded += len(pixels)
        sizes.add((pixels.shape[2], pixels.shape[1]))
        modes.add("grey" if pixels.ndim == 3 else "RGB")
        values = pixels.reshape(-1, 3 if pixels.ndim == 4 else 1)
        frequencies += [np.bincount(values[:, channel % values.shape[1]], minlength=256) for channel in range(3)]
    if not decoded:
        raise ValueError(f"none of {min(len(source), MOST_DECODED)} images could be read.")
    channels = 1 if modes == {"grey"} else 3
    shares = frequencies[:channels] / frequencies[:channels].sum(1, keepdims=True)
    scale = np.arange(256) / 255
    mean = shares @ scale
    std = np.sqrt(np.maximum(shares @ scale**2 - mean**2, 0))
    smallest, largest = ("×".join(str(pick(side)) for side in zip(*sizes, strict=True)) for pick in (min, max))
    size = smallest if len(sizes) == 1 else f"{smallest} to {largest}"
    return PixelStatistics(f"{size} {' and '.join(sorted(modes))}", tuple(mean), tuple(std), decoded)


def write_sheet(
    source: Source, file: Path, *, rows: int = 16, columns: int = 16, side: int = 48, on_error: str = "raise"
) -> None:
    """Write a PNG with some classes, evenly spread over all, one in each row with its name and its first images."""
    from PIL import Image, ImageDraw

    present = np.unique(source.labels)
    labels = present[_evenly(len(present), rows)]
    margin = 160
    picture = Image.new("RGB", (margin + columns * side, len(labels) * side), "white")
    draw = ImageDraw.Draw(picture)
    for row, label in enumerate(labels):
        draw.text((4, row * side + side // 3), str(source.classes[label])[:25], fill="black")
        members = np.flatnonzero(source.labels == label)
        for column, index in enumerate(members[_evenly(len(members), columns)]):
            if (image := _image(source, int(index), on_error)) is not None:
                small = image.convert("RGB")
                small.thumbnail((side - 2, side - 2))
                picture.paste(small, (margin + column * side, row * side))
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic(file) as written:
        picture.save(written, "PNG")


def _evenly(total: int, most: int) -> npt.NDArray[np.int64]:
    """Return at most `most` different numbers from 0 … total − 1, evenly spread."""
    return np.unique(np.linspace(0, total - 1, min(total, most)).astype(np.int64))


def _pixels(source: Source, on_error: str) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield images as uint8 arrays, [n, H, W] or [n, H, W, 3]."""
    if isinstance(source, ArraySource):
        for start in range(0, len(source), 2048):
            yield source.images[start : start + 2048]
        return
    for index in _evenly(len(source), MOST_DECODED):
        if (image := _image(source, int(index), on_error)) is not None:
            yield np.asarray(image if image.mode == "L" else image.convert("RGB"))[None]


def _image(source: Source, index: int, on_error: str) -> "Image.Image | None":
    try:
        return source.image(index)
    except (ValueError, OSError):
        if on_error == "skip":
            return None
        raise
