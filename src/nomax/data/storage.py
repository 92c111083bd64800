"""Shards on a disk or behind a URL: where they are, and reads that are tried again before they are an error.

A place is a pathlib.Path, or a RemotePath for what fsspec reads: s3://, gs://, https://, memory://, …
"""

import hashlib
import logging
import os
import queue
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, TypeVar

from nomax.data.source import DataError

OPEN_FILES = 32
CONNECTIONS = 16  # at a time, to ask for the sizes of many shards
READ_AHEAD = 1 << 22  # bytes, where a shard is read from its beginning to its end
LONGEST_PAUSE = 30.0  # seconds
# Errors that another attempt would only repeat.
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, DataError)

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.+)")

log = logging.getLogger("nomax.data")

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How often a read is tried, and how long a remote one may take."""

    retries: int = 4
    """Attempts after the first."""
    timeout: float = 60.0
    """Seconds for a read behind a URL. (A file system has time-outs of its own, such as those of an NFS mount.)"""
    pause: float = 0.5
    """Seconds before the second attempt; before each further one, twice as many."""

    def __post_init__(self) -> None:
        if self.retries < 0 or not self.timeout > 0:
            raise ValueError(
                f"retries={self.retries} must be at least 0, and timeout={self.timeout:g} seconds must be above 0."
            )

    def attempt(self, action: Callable[[], T], what: str) -> T:
        """Return what the action returns; after the last failure a DataError says what failed, how often and why."""
        began = time.monotonic()
        for number in range(self.retries + 1):
            try:
                return action()
            except PERMANENT:
                raise
            except Exception as error:  # every protocol has its own
                reason = str(getattr(error, "strerror", None) or error).rstrip(".") or type(error).__name__
                if number == self.retries:
                    tries = f"{number + 1} attempts in {time.monotonic() - began:.0f} seconds"
                    raise DataError(f"{what} cannot be read: {reason} ({tries}).") from error
                wait = min(self.pause * 2**number, LONGEST_PAUSE)
                log.warning("%s: %s; trying again in %g seconds", what, reason, wait)
                time.sleep(wait)
        raise AssertionError


PATIENCE = Patience()


@dataclass(frozen=True)
class RemotePath:
    """A file or folder behind a URL: what shards need of pathlib.Path."""

    url: str
    patience: Patience = field(default=PATIENCE, compare=False)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The extension of the name, with its dot."""
        return os.path.splitext(self.name)[1]

    @property
    def parent(self) -> "RemotePath":
        """The folder it is in; the root is in itself."""
        folder = self.url.rpartition("/")[0]
        return self if folder.endswith(":/") else RemotePath(folder, self.patience)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}", self.patience)

    def with_name(self, name: str) -> "RemotePath":
        """Return another name in the same folder."""
        return self.parent / name

    def is_file(self) -> bool:
        """Return whether there is such a file. (To fsspec's isfile a lost connection is a file that is not there.)"""
        try:
            return bool(self._ask(lambda system, path: system.info(path))["type"] == "file")
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Return whether there is such a folder."""
        return bool(self._ask(lambda system, path: system.isdir(path)))

    def glob(self, pattern: str) -> list["RemotePath"]:
        """Return the files of the folder with such names."""
        paths = self._ask(lambda system, path: [] if not system.isdir(path) else system.glob(f"{path}/{pattern}"))
        return [self / path.rpartition("/")[2] for path in paths]

    def stamp(self) -> tuple[int, int]:
        """Return its size in bytes, and a number that changes with its content, as far as the protocol tells."""
        try:
            about = self._ask(lambda system, path: system.info(path))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no shard {self}.") from None
        if not isinstance(about.get("size"), int):
            raise DataError(f"{self}: its size is not known, so that parts of it cannot be read.")
        marks = ("ETag", "LastModified", "Last-Modified", "mtime", "created")
        changes = [str(about[mark]) for mark in marks if mark in about]
        return about["size"], int.from_bytes(hashlib.sha256(" ".join(changes).encode()).digest()[:8]) >> 1

    def read_bytes(self, most: int) -> bytes:
        """Return the whole file, unless it has more than `most` bytes."""
        size = self.stamp()[0]
        if size > most:
            raise DataError(f"{self} has {size:,} bytes, more than the limit of {most:,}.")
        return bytes(self._ask(lambda system, path: system.cat_file(path)))

    def open(self, *, sequential: bool = False) -> BinaryIO:
        """Open it to be read in parts, or once from the beginning to the end."""
        how = {"cache_type": "readahead", "block_size": READ_AHEAD} if sequential else {"cache_type": "none"}
        opened: BinaryIO = self._ask(lambda system, path: system.open(path, "rb", **how))
        return opened

    def _ask(self, question: Callable[[Any, str], Any]) -> Any:
        system, path = _filesystem(self.url)
        return self.patience.attempt(lambda: within(self.patience.timeout, lambda: question(system, path)), str(self))


Place = Path | RemotePath


def is_url(text: str) -> bool:
    """Return whether a text is a URL rather than a name or path."""
    return _URL.fullmatch(text) is not None


def place(text: str, patience: Patience = PATIENCE) -> Place:
    """Return the place that a path or URL names."""
    match = _URL.fullmatch(text)
    if match is None:
        return Path(text).expanduser()
    if match[1].lower() in ("file", "local"):
        return Path(match[2])
    return RemotePath(text.rstrip("/"), patience)


def stamps(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Return size and modification time of files, of remote ones many at a time."""
    if not any(isinstance(each, RemotePath) for each in places):
        return [_local_stamp(each) for each in places if isinstance(each, Path)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(lambda each: each.stamp(), (each for each in places if isinstance(each, RemotePath))))


class OpenFiles:
    """Read parts of many files; those used last stay open."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._remote: OrderedDict[str, BinaryIO] = OrderedDict()
        self._process = os.getpid()

    def read(self, place: Place, offset: int, size: int) -> bytes:
        """Return the bytes there; fewer than `size` only if the file ends before."""
        what = f"{place}: {size:,} bytes at offset {offset:,}"
        if isinstance(place, RemotePath):
            action = lambda: within(self.patience.timeout, lambda: self._fetch(place, offset, size))  # noqa: E731
            return self.patience.attempt(lambda: self._reopened(place, action), what)
        try:
            return os.pread(self._descriptor(place), size, offset)
        except OSError:  # only now, as most reads are a few microseconds
            return self.patience.attempt(
                lambda: self._reopened(place, lambda: os.pread(self._descriptor(place), size, offset)), what
            )

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close them all. (At the end of a program, modules such as os are gone before objects are.)"""
        while self._descriptors:
            close(self._descriptors.popitem()[1])
        self._remote.clear()

    def _reopened(self, place: Place, action: Callable[[], bytes]) -> bytes:
        """Do it; after an error the file is opened again: its connection, or its handle on a server, may be stale."""
        try:
            return action()
        except Exception:
            self._remote.pop(str(place), None)
            if (descriptor := self._descriptors.pop(str(place), None)) is not None:
                os.close(descriptor)
            raise

    def _descriptor(self, path: Path) -> int:
        name = str(path)
        if name not in self._descriptors:
            if len(self._descriptors) >= OPEN_FILES:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[name] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._descriptors.move_to_end(name)
        return self._descriptors[name]

    def _fetch(self, place: RemotePath, offset: int, size: int) -> bytes:
        if self._process != os.getpid():  # a connection does not survive a fork
            self._process, self._remote = os.getpid(), OrderedDict()
        if place.url not in self._remote:
            if len(self._remote) >= OPEN_FILES:
                self._remote.popitem(last=False)
            system, path = _filesystem(place.url)
            self._remote[place.url] = system.open(path, "rb", cache_type="none")
        self._remote.move_to_end(place.url)
        file = self._remote[place.url]
        file.seek(offset)
        return file.read(size)


def within(seconds: float, action: Callable[[], T]) -> T:
    """Return what an action returns, or raise a TimeoutError. One that never ends is left alone in its thread."""
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((action(), None))
        except BaseException as error:
            answers.put((None, error))

    Thread(target=work, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} seconds") from None
    if error is not None:
        raise error
    result: T = answer
    return result


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{url}: to read URLs: pip install fsspec") from error
    if "::" in url:
        raise ValueError(f"{url}: a chain of protocols (::) cannot be used here; give the last URL alone.")
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"{url}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}.") from error
    return system, path


def _local_stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no shard {path}.") from None
    except OSError as error:
        raise DataError(f"the shard {path} cannot be read: {error.strerror}.") from error
    return status.st_size, status.st_mtime_ns
