"""`nomax data info`: describe a data set."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.text import Text

from nomax.console import Console, Table
from nomax.data.images.describe import Description, describe_images, write_sheet
from nomax.data.load import load
from nomax.data.registry import IMAGES, cache_folder
from nomax.data.source import Source, read_meta
from nomax.data.text.describe import describe_text, is_text

SPLITS = ("train", "test", "val")


@dataclass(frozen=True)
class Options:
    """Describe a data set: images by split and class, sizes, pixel statistics, licence, and where it lies.

    Of text: pairs, documents and words by split.
    """

    data: Annotated[str, tyro.conf.arg(metavar="DATA"), tyro.conf.Positional]
    """A name of `nomax data list`, a folder, shards, torchvision:NAME, hf:NAME, JSONL documents, or texts as
    FILE,FILE."""
    split: str | None = None
    """Only this split; otherwise train, test and val, as far as they are there."""
    held_out: float = 0.0
    """Of images without a test split: the share that is held out as one, as in `nomax train vit`."""
    languages: tuple[str, str] | None = None
    """Of text: source and target, where the data does not say them, or has more."""
    sheet: Path | None = None
    """Write a sheet of small pictures into this PNG file: a class in each row."""
    on_error: Literal["raise", "skip"] = "raise"
    """Stop at images of a folder or of shards that cannot be read, or leave them out."""


def run(options: Options) -> int:
    """Return 0 if it could be read, 2 if not."""
    console = Console()
    try:
        if is_text(options.data):
            describe_text(options.data, options.split, options.languages, console)
            return 0
        sources = _sources(options)
        for title, text in _facts(options.data).items():
            console.print(Text.assemble((title, "bold"), f" {text}"))
        console.print(_table({split: describe_images(source, options.on_error) for split, source in sources.items()}))
        if options.sheet:
            write_sheet(next(iter(sources.values())), options.sheet, on_error=options.on_error)
            console.print(f"Written: {options.sheet}")
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax data info: {error}", file=sys.stderr)
        return 2
    return 0


def _sources(options: Options) -> dict[str, Source]:
    if options.split:
        return {options.split: _load(options, options.split)}
    sources: dict[str, Source] = {}
    refused: Exception | None = None
    for split in IMAGES[options.data].counts if options.data in IMAGES else SPLITS:
        try:
            source = _load(options, split)
        except (ValueError, FileNotFoundError) as error:
            refused = refused or error
            continue
        # A set with one held-out split has it under both names.
        if not any(len(source) == len(other) and source.name(0) == other.name(0) for other in sources.values()):
            sources[split] = source
    if not sources and refused:
        raise refused
    return sources


def _load(options: Options, split: str) -> Source:
    return load(options.data, split, on_error=options.on_error, held_out=options.held_out)


def _facts(data: str) -> dict[str, str]:
    """Return the facts besides the images."""
    if data not in IMAGES:
        return {"data": data}
    entry = IMAGES[data]
    facts = {entry.name: entry.summary, "licence": entry.licence}
    if not entry.packages:
        return facts
    folder = cache_folder() / entry.name
    meta: dict[str, Any] = read_meta(folder)
    facts["from"] = ", ".join(f"{package['name']} {package['version']}" for package in meta["packages"])
    facts["in"] = str(folder)
    if (folder / "ATTRIBUTION.txt").exists():
        facts["authors and licences"] = str(folder / "ATTRIBUTION.txt")
    if "subset" in meta:
        facts["subset"] = f"{len(meta['subset']):,} classes, {meta['subset_rule']}"
    return facts


def _table(descriptions: dict[str, Description]) -> Table:
    rows: dict[str, list[str]] = {
        "images": [f"{split.images:,}" for split in descriptions.values()],
        "classes": [f"{split.classes:,}" for split in descriptions.values()],
        "images of the smallest class": [f"{split.fewest:,}" for split in descriptions.values()],
        "… of the middle one": [f"{split.median:,g}" for split in descriptions.values()],
        "… of the largest": [f"{split.most:,}" for split in descriptions.values()],
        "size": [split.sizes for split in descriptions.values()],
        "mean of the pixels": [_numbers(split.mean) for split in descriptions.values()],
        "standard deviation": [_numbers(split.std) for split in descriptions.values()],
    }
    if any(split.decoded < split.images for split in descriptions.values()):
        rows["taken from"] = [f"{split.decoded} images" for split in descriptions.values()]
    table = Table("", *descriptions)
    for title, cells in rows.items():
        table.add_row(title, *cells)
    return table


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4f}" for value in values)
