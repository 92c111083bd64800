"""The store of results: a folder for each run.

runs/KEY/         an ordinary run folder of `nomax train`, and outcome.json, written last
runs/KEY.lock     held by whoever works on the run; free again as soon as that process is gone
runs/KEY.log      what the run printed
"""

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from nomax import _files
from nomax.study.engine.result import LARGEST, Result

OUTCOME, STUDIES = "outcome.json", "studies.txt"
LEFT_OUT = shutil.ignore_patterns("checkpoints", ".lock", ".*.aside")  # of a run that is copied


class Store:
    """A folder that many processes may work in at the same time."""

    def __init__(self, folder: str | Path, create: bool = True) -> None:
        self.place = Path(folder).resolve()
        if create:
            (self.place / "runs").mkdir(parents=True, exist_ok=True)
        self.published: dict[str, Result] = {}
        """Results of runs that were done elsewhere, and have no folder here."""
        self._told: set[str] = set()  # of what there was something to say

    def folder(self, key: str) -> Path:
        """Return the folder of a run."""
        return self.place / "runs" / key

    def log(self, key: str) -> Path:
        """Return the file of what a run printed."""
        return self.place / "runs" / f"{key}.log"

    def finished(self) -> list[str]:
        """Return the runs with an outcome."""
        return sorted(path.parent.name for path in (self.place / "runs").glob(f"[!.]*/{OUTCOME}"))

    def read(self, key: str) -> Result | None:
        """Return the result of a run; None if it is not finished. A ValueError names an unreadable outcome."""
        path = self.folder(key) / OUTCOME
        try:
            if path.exists() and not path.is_file():  # a pipe would be waited for
                raise ValueError("it is not a file.")
            with path.open("rb") as file:
                result = Result.from_json(file.read(LARGEST + 1))
            if result.key != key:
                raise ValueError(f"it is the outcome of another run, {result.key[:80]!r}.")
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{path} cannot be read: {reason}. Put a copy there that can, or remove it.") from None
        return result

    def outcome(self, key: str) -> Result | None:
        """Return the result of a run; None if it is not finished, or with a warning if it cannot be read."""
        try:
            return self.read(key) or self.published.get(key)
        except ValueError as error:
            self._tell(key, f"{error} Until then this run counts as not done, and is done again if a study needs it.")
            return None

    def _tell(self, what: str, message: str) -> None:
        """Print a warning, once."""
        if what not in self._told:
            print(f"nomax study: {message}", file=sys.stderr)
        self._told.add(what)

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Try to claim a run, and yield True if that worked. The lock ends with the process, however that ends."""
        lock = FileLock(self.place / "runs" / f"{key}.lock", timeout=0)
        with suppress(Timeout):
            lock.acquire()
        try:
            yield lock.is_locked
        finally:
            lock.release()

    def busy(self, key: str) -> bool:
        """Return True if a process holds a run now."""
        with self.claim(key) as free:
            return not free

    def publishing(self) -> FileLock:
        """Return the lock to hold while writing a results folder."""
        return FileLock(self.place / "publish.lock")

    def finish(self, result: Result) -> None:
        """Write the outcome of a run, complete or not at all. The caller holds the run."""
        _files.write(self.folder(result.key) / OUTCOME, result.to_json())

    def reopen(self, key: str) -> None:
        """Remove the outcome of a run, to try it again. The caller holds the run."""
        (self.folder(key) / OUTCOME).unlink(missing_ok=True)
        (self.folder(key) / STUDIES).unlink(missing_ok=True)
        with suppress(OSError):  # a run that failed before it began leaves nothing else, and must leave no folder
            self.folder(key).rmdir()

    def belongs(self, keys: Iterable[str], study: str) -> None:
        """Note that finished runs are part of a study."""
        for key in keys:
            if (self.folder(key) / OUTCOME).exists() and study not in self.studies(key):
                with (self.folder(key) / STUDIES).open("a", encoding="utf-8") as file:
                    file.write(f"{study}\n")

    def studies(self, key: str) -> list[str]:
        """Return the studies that a run is part of."""
        path = self.folder(key) / STUDIES
        try:
            return sorted(set(path.read_text(encoding="utf-8").splitlines()))
        except FileNotFoundError:
            return []
        except (UnicodeDecodeError, OSError) as error:
            self._tell(
                str(path), f"{path} cannot be read: {error}. This run counts as part of no study: remove the file."
            )
            return []

    def results(self, keys: Collection[str] | None = None, study: str | None = None) -> list[Result]:
        """Return the results of these runs in their order, or those of a study, or all."""
        chosen = list(dict.fromkeys([*self.finished(), *self.published])) if keys is None else keys
        return [
            result
            for key in chosen
            if (study is None or study in self.studies(key)) and (result := self.outcome(key)) is not None
        ]


def merge(store: Store, others: Sequence[Store]) -> list[str]:
    """Copy the finished runs of other stores into this one, all or none; returns the keys of those that were new.

    A ValueError names what stands in the way: two different results of one run (the same result with other times is no
    contradiction), an outcome that cannot be read, a symbolic link, none of which is followed, or somebody at work.
    After an error nothing has been copied.
    """
    wanted: dict[str, Store] = {}
    studies: dict[str, set[str]] = {}
    for other in others:
        for key, result in _outcomes(other):
            studies.setdefault(key, set()).update(other.studies(key))
            known = _agreed(store, key, result, other)
            if key in wanted:
                _agreed(wanted[key], key, result, other)
            elif not known:
                wanted[key] = other
    with _aside(store) as (new, old):
        for key, other in wanted.items():
            shutil.copytree(other.folder(key), new / key, symlinks=True, ignore=LEFT_OUT)
            (new / key / STUDIES).unlink(missing_ok=True)
            (new / key / STUDIES).write_text("".join(f"{name}\n" for name in sorted(studies[key])), encoding="utf-8")
        for key in studies.keys() - wanted.keys():
            for study in sorted(studies[key]):
                store.belongs([key], study)
        return _move(store, new, old, wanted)


def _outcomes(store: Store) -> Iterator[tuple[str, Result]]:
    """Yield the finished runs of a store, after checking that all that would be copied lies within it."""
    _within(store.place / "runs")
    for key in store.finished():
        _within(store.folder(key))
        for folder, folders, names in os.walk(store.folder(key)):
            left_out = LEFT_OUT(folder, [*folders, *names])
            folders[:] = [name for name in folders if name not in left_out]
            for name in {*folders, *names} - left_out:
                _within(Path(folder, name))
        result = store.read(key)
        if result is not None:
            yield key, result


def _within(path: Path) -> None:
    if path.is_symlink():
        raise ValueError(
            f"{path} is a symbolic link, which is not followed: put there what it points to, or remove it."
        )
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"{path} is neither a file nor a folder, and cannot be copied: remove it.")


def _agreed(store: Store, key: str, result: Result, other: Store) -> bool:
    """Return True if a store has this outcome, too; raise a ValueError if it has another one."""
    rival = store.read(key)
    if rival is None:
        return False
    if rival.comparable != result.comparable:
        here, there = rival.comparable, result.comparable
        differ = [name for name in here.keys() | there.keys() if here.get(name) != there.get(name)]
        raise ValueError(
            f"two different outcomes of the run {key} ({result.label}): {store.folder(key)} has {_words(rival)}, "
            f"{other.folder(key)} has {_words(result)}; they differ in {', '.join(sorted(differ))}. Remove one of them."
        )
    return True


def _words(result: Result) -> str:
    return f"{result.status}, {result.summary}" if result.status == "done" else result.status


@contextmanager
def _aside(store: Store) -> Iterator[tuple[Path, Path]]:
    """Make two folders in a store, for new runs and for those that they replace; both are removed at the end."""
    lock = FileLock(store.place / "merge.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another merge into {store.place} is under way: wait until it is done.") from None
    aside = store.place / "runs" / ".merge"
    new, old = aside / "new", aside / "old"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a merge that was killed
        for folder in (new, old):
            folder.mkdir(parents=True)
        yield new, old
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        lock.release()


def _move(store: Store, new: Path, old: Path, sources: Mapping[str, Store]) -> list[str]:
    """Move copied runs into place, over unfinished ones; if that fails, undo it all."""
    moved: list[str] = []
    try:
        for key, source in sources.items():
            with store.claim(key) as free:
                if not free:
                    raise ValueError(f"somebody works on the run {key} in {store.place}; wait until it is done.")
                result = Result.from_json((new / key / OUTCOME).read_bytes())
                if _agreed(store, key, result, source):  # finished meanwhile
                    continue
                moved.append(key)
                if store.folder(key).exists():
                    os.replace(store.folder(key), old / key)
                os.replace(new / key, store.folder(key))
        _files.sync_folder(store.place / "runs")
    except BaseException:
        for key in moved:
            if not (new / key).exists():
                os.replace(store.folder(key), new / key)
            if (old / key).exists():
                os.replace(old / key, store.folder(key))
        raise
    return moved
