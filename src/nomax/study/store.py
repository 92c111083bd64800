"""The store of results: a folder for each run, which is the truth, and a database that is made from them.

runs/KEY/         an ordinary run folder of `nomax train`, and outcome.json, written last
runs/KEY.lock     held by whoever works on the run; free again as soon as that process is gone
runs/KEY.log      what the run had to say
results.sqlite    table runs: key, status, studies, json; made again from the run folders if it is lost or damaged
"""

import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nomax.study.row import Row
from nomax.train import files

OUTCOME, STUDIES = "outcome.json", "studies.txt"
WAIT = 60.0  # seconds that a writer waits for another
# What sqlite says about a file that is not, or no longer, a database of ours; not about locks and full disks.
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
TABLE = """
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY, status TEXT NOT NULL, studies TEXT NOT NULL, json TEXT NOT NULL, changed INTEGER NOT NULL
)"""


class Store:
    """A folder that many processes may work in at the same time."""

    def __init__(self, folder: str | Path, create: bool = True) -> None:
        self.place = Path(folder).resolve()
        self.database = self.place / "results.sqlite"
        if create:
            (self.place / "runs").mkdir(parents=True, exist_ok=True)
        self._unreadable: set[str] = set()  # what has been told
        self._mending = FileLock(self.place / "results.lock")

    def folder(self, key: str) -> Path:
        """Where a run is."""
        return self.place / "runs" / key

    def log(self, key: str) -> Path:
        """What a run had to say."""
        return self.place / "runs" / f"{key}.log"

    def finished(self) -> list[str]:
        """The runs with an outcome."""
        return sorted(path.parent.name for path in (self.place / "runs").glob(f"[!.]*/{OUTCOME}"))

    def outcome(self, key: str) -> Row | None:
        """What came out of a run; None if it is not over."""
        path = self.folder(key) / OUTCOME
        try:
            return Row.from_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            if key not in self._unreadable:
                print(f"nomax study: {path} cannot be read ({error}); this run counts as not done.", file=sys.stderr)
            self._unreadable.add(key)
            return None

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Hold a run, if nobody else does: says whether. The lock goes with the process, however that ends."""
        lock = FileLock(self.place / "runs" / f"{key}.lock", timeout=0)
        with suppress(Timeout):
            lock.acquire()
        try:
            yield lock.is_locked
        finally:
            lock.release()

    def busy(self, key: str) -> bool:
        """Whether somebody works on a run just now."""
        with self.claim(key) as free:
            return not free

    def publishing(self) -> FileLock:
        """To be held by whoever writes a results folder: one at a time."""
        return FileLock(self.place / "publish.lock")

    def finish(self, row: Row) -> None:
        """Write the outcome of a run, complete or not at all. Whoever calls this holds the run."""
        folder = self.folder(row.key)
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / OUTCOME, row.to_json())

    def reopen(self, key: str) -> None:
        """Take back the outcome of a run, to try it again. Whoever calls this holds the run."""
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
        """The studies that a run is part of."""
        try:
            return sorted(set((self.folder(key) / STUDIES).read_text(encoding="utf-8").splitlines()))
        except FileNotFoundError:
            return []

    def rows(self, keys: Collection[str] | None = None, study: str | None = None) -> list[Row]:
        """The results of these runs, or of all of a study, or of all: as the database has them after a look around."""
        found = self._mended()
        chosen = [
            (key, text)
            for key, studies, text in found
            if (keys is None or key in keys) and (study is None or study in json.loads(studies))
        ]
        rows = {key: Row.from_json(text) for key, text in chosen}
        order = rows if keys is None else keys  # those of a grid come in its order
        return [rows[key] for key in order if key in rows]

    def sync(self) -> None:
        """Bring the database up to date with the run folders; make it again if it is damaged."""
        self._mended()

    def _mended(self) -> list[Any]:
        """The table, up to date; if the database is damaged, it is thrown away and made again."""
        if not (self.place / "runs").is_dir():
            return []
        try:
            return self._sync()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF not in DAMAGE:
                raise
            with self._mending:
                try:
                    return self._sync()  # somebody else may have mended it meanwhile
                except sqlite3.DatabaseError:
                    print(f"nomax study: {self.database} is damaged ({error}); made again.", file=sys.stderr)
                    for ending in ("", "-wal", "-shm"):
                        Path(f"{self.database}{ending}").unlink(missing_ok=True)
                    return self._sync()

    def _sync(self) -> list[Any]:
        """Look around, and return all of the table: key, studies, json."""
        with self._open() as database:
            stored = database.execute("SELECT key, changed, studies FROM runs").fetchall()
            known = {key: (changed, studies) for key, changed, studies in stored}
            there = set()
            for key in self.finished():
                try:
                    changed = (self.folder(key) / OUTCOME).stat().st_mtime_ns
                except FileNotFoundError:  # taken back at this moment
                    continue
                studies = json.dumps(self.studies(key))
                if known.get(key) != (changed, studies):
                    row = self.outcome(key)
                    if row is None:
                        continue
                    values = (key, row.status, studies, row.to_json(), changed)
                    database.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?)", values)
                there.add(key)
            gone = [(key,) for key in known.keys() - there]
            database.executemany("DELETE FROM runs WHERE key = ?", gone)
            return database.execute("SELECT key, studies, json FROM runs ORDER BY key").fetchall()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.database, timeout=WAIT, isolation_level=None)) as database:
            with self._mending:  # two that turn on the WAL at the same time do not wait for each other
                database.execute("PRAGMA journal_mode = WAL")
                database.execute(TABLE)
            database.execute("PRAGMA synchronous = NORMAL")
            yield database


def merge(store: Store, others: Sequence[Store]) -> list[str]:
    """Copy the finished runs of other stores into this one; returns the keys of those that were new.

    Two different results of one run are a contradiction, and a ValueError that names them; the same result with other
    times is not. Nothing is copied unless everything can be.
    """
    wanted: dict[str, tuple[Store, Row]] = {}
    for other in others:
        for key in other.finished():
            row = other.outcome(key)
            if row is None:
                continue
            before = store.outcome(key)
            rivals = [(store, before)] if before else []
            rivals += [wanted[key]] if key in wanted else []
            for place, rival in rivals:
                if rival.result != row.result:
                    raise ValueError(
                        f"two different outcomes of the run {key} ({row.label}): {place.folder(key)} has "
                        f"{_words(rival)}, {other.folder(key)} has {_words(row)}. Remove one of them."
                    )
            if not before and key not in wanted:
                wanted[key] = (other, row)
    copied = []
    for key, (other, _) in wanted.items():
        with store.claim(key) as free:
            if not free:
                raise ValueError(f"somebody works on the run {key} in {store.place}; wait until it is done.")
            if store.outcome(key) is None:
                _copy(other.folder(key), store.folder(key))
                copied.append(key)
    for other in others:
        for key in other.finished():
            for study in other.studies(key):
                store.belongs([key], study)
    store.sync()
    return copied


def _words(row: Row) -> str:
    return f"{row.status}, {row.said}" if row.status == "done" else row.status


def _copy(source: Path, target: Path) -> None:
    """A folder that is complete or not there: copied aside, then renamed. An unfinished run there gives way."""
    aside = target.with_name(f".{target.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside, ignore=shutil.ignore_patterns("checkpoints", ".lock", ".*.aside", STUDIES))
    if target.exists():
        shutil.rmtree(target)
    os.replace(aside, target)
    files.sync_folder(target.parent)
