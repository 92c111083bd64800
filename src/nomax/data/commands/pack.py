"""`nomax data pack`: write a folder of images as WebDataset shards, a few large files that are read and copied fast."""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
import tyro

from nomax._files import atomic, write_json
from nomax.console import Console, counting
from nomax.data.images import files, layouts, shard_index
from nomax.data.images.files import FileSource, FolderSource
from nomax.data.order import Integers, Order
from nomax.data.source import DataError

BLOCK = 512  # bytes; a tar file consists of such


@dataclass(frozen=True)
class Options:
    """Pack a folder of images (FOLDER/train/CLASS/image.jpg, FOLDER/CLASS/image.jpg, ImageNet, …) into tar shards.

    They are WebDataset's. Writes OUTPUT/SPLIT-000000.tar and so on with their indexes, classes.json, and
    SPLIT-packing.json, which records what was packed and how. Files are copied unchanged. The same folder and options
    give the same shards, byte for byte. If it is stopped, the same command resumes. To train on the shards: nomax train
    vit --data OUTPUT.
    """

    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    """The folder of images."""
    output: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUTPUT")]]
    """The folder for the shards."""
    split: str = "train"
    """The split to pack; run the command again for the others."""
    shard_size: int = 1000
    """Most images in a shard."""
    max_bytes: int = 1 << 30
    """Largest size of a shard in bytes, unless a single image is larger."""
    shuffle: bool = True
    """Mix the classes. Training that reads shards in blocks needs it; without it, images are sorted by name."""
    seed: int = 0
    """Seed of the shuffle."""
    check: bool = False
    """Decode every image, to find broken ones now."""
    on_error: Literal["raise", "skip"] = "raise"
    """Stop at a broken image or empty class, or leave it out and say so."""


def run(options: Options) -> int:
    """Write the shards that are not there yet."""
    pack(options)
    return 0


def pack(options: Options, console: Console | None = None) -> None:
    """Write the shards that are not there yet."""
    if options.shard_size < 1 or options.max_bytes < 1:
        raise ValueError("--shard-size and --max-bytes must be at least 1.")
    console = console or Console()
    source = _files(options)
    order = Order(len(source), 1, options.seed, options.shuffle).epoch(0)
    sizes = np.array([Path(source.name(int(index))).stat().st_size for index in order])
    shards = list(_plan(sizes, options.shard_size, options.max_bytes))
    options.output.mkdir(parents=True, exist_ok=True)
    _claim(options, source, order, sizes, len(shards))

    skipped: list[str] = []
    kept = 0
    with counting(console) as progress:
        task = progress.add_task("Packing", total=len(source))
        for number, part in enumerate(shards):
            tar = options.output / f"{options.split}-{number:06d}.tar"
            progress.update(task, description=f"Packing {tar.name}")
            if tar.exists():
                kept += 1
            else:
                with atomic(tar) as file:
                    os.fchmod(file.fileno(), 0o644)
                    _write(file, _entries(options, source, order, part, skipped))
            shard_index.index_of(tar)
            progress.advance(task, part.stop - part.start)
    for line in skipped:
        console.print(f"left out: {line}")
    size = sum(tar.stat().st_size for tar in options.output.glob(f"{options.split}-*.tar"))
    console.print(
        f"{options.output}: {len(source) - len(skipped):,} images of {len(source.classes):,} classes in "
        f"{len(shards):,} shards, {size / 1e6:,.1f} MB"
        + (f"; {kept:,} were there already" if kept else "")
        + (f"; {len(skipped):,} broken images left out" if skipped else ""),
    )


def _files(options: Options) -> FileSource:
    folder = options.folder.expanduser()
    source = layouts.recognised(folder, options.split, options.on_error) if folder.is_dir() else None
    source = source or FolderSource(folder, options.split, options.on_error)
    if not isinstance(source, FileSource):
        raise ValueError(f"{folder} holds {source!r}, of which not each image is a file; it can be used as it is.")
    return source


def _plan(sizes: Integers, most_images: int, most_bytes: int) -> Iterator[slice]:
    """Yield the images of each shard: as many as fit."""
    start, total = 0, 2 * BLOCK
    for number, size in enumerate(sizes.tolist()):
        needed = 3 * BLOCK + -(-size // BLOCK) * BLOCK  # two headers, the label, the image
        if number > start and (number - start >= most_images or total + needed > most_bytes):
            yield slice(start, number)
            start, total = number, 2 * BLOCK
        total += needed
    yield slice(start, len(sizes))


def _entries(
    options: Options, source: FileSource, order: Integers, part: slice, skipped: list[str]
) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the members of one shard."""
    for position in range(part.start, part.stop):
        index = int(order[position])
        try:
            data = source.read(index)
            if options.check:
                files.decode(data, source.name(index))
        except DataError as error:
            if options.on_error == "raise":
                raise
            skipped.append(str(error))
            continue
        extension = source.name(index).rpartition(".")[2].lower()
        yield f"{position:09d}.{extension}", data
        yield f"{position:09d}.cls", str(source.labels[index]).encode()


def _write(file: IO[bytes], entries: Iterator[tuple[str, bytes]]) -> None:
    # Fixed owner, time and mode (TarInfo's own defaults): the same images give the same file.
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in entries:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, BytesIO(data))


def _claim(options: Options, source: FileSource, order: Integers, sizes: Integers, shards: int) -> None:
    """Record in the output folder what is being packed; raise if something else was packed there before."""
    digest = hashlib.sha256()
    for index, size in zip(order.tolist(), sizes.tolist(), strict=True):
        name = Path(source.name(index)).relative_to(source.folder)
        digest.update(f"{name}\0{size}\0{source.labels[index]}\n".encode(errors="surrogateescape"))
    packing: dict[str, Any] = {
        "images": len(source),
        "shards": shards,
        "listing": digest.hexdigest(),
        "shard_size": options.shard_size,
        "max_bytes": options.max_bytes,
        "shuffle": options.shuffle,
        "seed": options.seed,
        "check": options.check,
        "on_error": options.on_error,
    }
    note = options.output / f"{options.split}-packing.json"
    if note.exists():
        before = json.loads(note.read_text(encoding="utf-8"))
        differences = [name for name in packing if before.get(name) != packing[name]]
        if differences:
            raise ValueError(
                f"{options.output} holds another packing of {options.split!r}: its {', '.join(differences)} differ "
                f"(see {note}). Choose another folder, or remove that one."
            )
    elif any(options.output.glob(f"{options.split}-*.tar")):
        raise ValueError(f"{options.output} has shards of {options.split!r} that were not made by nomax data pack.")
    classes = options.output / "classes.json"
    if classes.exists() and json.loads(classes.read_text(encoding="utf-8")) != list(source.classes):
        raise ValueError(f"{classes} lists other classes than {source.folder} has. Choose another output folder.")
    write_json(classes, list(source.classes))
    write_json(note, packing)
