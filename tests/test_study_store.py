"""The store: run folders are the truth, the database follows them, and many may work in it."""

import json
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from toy_study import row

from nomax.study.row import Row, where
from nomax.study.store import Store, merge

KEYS = [f"{number:016x}" for number in range(6)]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def fill(store, *rows, study="toy"):
    for one in rows:
        store.finish(one)
    store.belongs([one.key for one in rows], study)


def in_database(store):
    with closing(sqlite3.connect(store.database)) as database:
        return database.execute("SELECT key, status, studies, json FROM runs ORDER BY key").fetchall()


def test_a_row_survives_its_way_through_json():
    full = row(gate="silu", probes={"digits": 0.25}, ten_shot=0.25, error="é | “x”\n", diverged_at=3)
    assert Row.from_json(full.to_json()) == full


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"status": "done"}', row().to_json().replace('"done"', '"odd"')])
def test_what_is_not_an_outcome_is_said_to_be_none(text, store, capsys):
    store.finish(row(KEYS[0]))
    (store.folder(KEYS[0]) / "outcome.json").write_text(text)
    assert store.outcome(KEYS[0]) is None
    assert "cannot be read" in capsys.readouterr().err


def test_where_finds_rows_by_their_values_and_refuses_unknown_fields():
    rows = [row(alpha=0.1 + 0.2, seed=1), row(alpha=1.0), row(alpha=1.0, gate="silu")]
    assert where(rows, alpha=0.3) == rows[:1]
    assert where(rows, alpha=1, gate=None) == [rows[1]]
    with pytest.raises(TypeError, match="alhpa"):
        where(rows, alhpa=1)


def test_rows_come_from_the_database_in_the_order_asked_for(store):
    rows = [row(key, seed=number) for number, key in enumerate(KEYS)]
    fill(store, *rows)
    assert store.rows([KEYS[3], KEYS[1], "f" * 16]) == [rows[3], rows[1]]
    found = in_database(store)
    assert [entry[:3] for entry in found] == [(key, "done", '["toy"]') for key in KEYS]
    assert json.loads(found[2][3])["seed"] == 2


def test_a_run_may_be_part_of_several_studies(store):
    fill(store, row(KEYS[0]), row(KEYS[1]), study="alpha")
    store.belongs([KEYS[1], KEYS[5]], "gate")
    store.belongs([KEYS[1]], "gate")
    store.belongs([KEYS[0]], "my own")
    assert [found.key for found in store.rows(study="my own")] == [KEYS[0]]
    assert [found.key for found in store.rows(study="gate")] == [KEYS[1]]
    assert store.studies(KEYS[1]) == ["alpha", "gate"]


@pytest.mark.parametrize("damage", ["missing", "garbage", "cut", "empty", "strange"])
def test_the_database_is_made_again_from_the_run_folders(damage, store):
    rows = [row(key, error="x" * 5000) for key in KEYS]
    fill(store, *rows)
    before = store.rows()
    for ending in ("-wal", "-shm"):
        store.database.with_name(store.database.name + ending).unlink(missing_ok=True)
    if damage == "missing":
        store.database.unlink()
    elif damage == "garbage":
        store.database.write_bytes(b"not a database at all " * 500)
    elif damage == "cut":
        store.database.write_bytes(store.database.read_bytes()[:-9000])
    elif damage == "empty":
        store.database.write_bytes(b"")
    else:
        store.database.unlink()
        with closing(sqlite3.connect(store.database)) as database:
            database.execute("CREATE TABLE runs (something TEXT)")
    again = Store(store.place)
    assert again.rows() == before == rows
    assert len(in_database(again)) == len(rows)


def test_the_database_follows_the_folders_whatever_happened_between(store):
    fill(store, row(KEYS[0]), row(KEYS[1], status="failed", accuracy=None))
    store.sync()
    store.finish(row(KEYS[2]))  # and then the process died
    store.reopen(KEYS[1])
    store.finish(row(KEYS[0], accuracy=0.75))
    assert [(found.key, found.accuracy) for found in store.rows()] == [(KEYS[0], 0.75), (KEYS[2], 0.5)]


def test_a_run_whose_outcome_was_damaged_is_in_no_table_and_told_once(store, capsys):
    fill(store, row(KEYS[0]), row(KEYS[1]))
    store.sync()
    (store.folder(KEYS[0]) / "outcome.json").write_text("{")
    for _ in range(3):
        assert [found.key for found in store.rows()] == [KEYS[1]]
    assert capsys.readouterr().err.count("cannot be read") == 1


def test_many_writers_lose_nothing(store):
    failures = []

    def write(number):
        try:
            mine = Store(store.place)
            for part in range(5):
                fill(mine, row(f"{number * 100 + part:016x}", seed=part), study=f"study-{number}")
                mine.sync()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store.rows()) == len(in_database(store)) == 40


def test_a_run_is_held_by_one_and_free_again_when_its_holder_is_killed(store):
    with store.claim(KEYS[0]) as first, store.claim(KEYS[0]) as second, store.claim(KEYS[1]) as other:
        assert (first, second, other) == (True, False, True)
        assert store.busy(KEYS[0])
    assert not store.busy(KEYS[0])
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    lock = store.place / "runs" / f"{KEYS[0]}.lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], **pipes) as holder:
        holder.stdout.readline()
        assert store.busy(KEYS[0])
        holder.kill()
        holder.wait()
    assert not store.busy(KEYS[0])


def test_stores_are_joined_with_all_that_is_worth_keeping(tmp_path, store):
    others = [Store(tmp_path / name) for name in ("one", "two")]
    fill(store, row(KEYS[0]))
    fill(others[0], row(KEYS[0], seconds=9.0), row(KEYS[1], seed=1), study="alpha")
    fill(others[1], row(KEYS[1], seed=1, seconds=7.0), row(KEYS[2], status="diverged", accuracy=None), study="gate")
    for name in ("metrics.jsonl", "model/model.safetensors", "checkpoints/step-00000001.pt", ".lock"):
        path = others[0].folder(KEYS[1]) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (store.place / "runs" / f".{KEYS[1]}.aside").mkdir()  # of a copy that was interrupted
    (others[1].folder(KEYS[3])).mkdir()  # not finished
    assert merge(store, others) == KEYS[1:3]
    assert merge(store, others) == []
    rows = store.rows()
    assert [(found.key, found.seconds) for found in rows] == [(KEYS[0], 2.0), (KEYS[1], 2.0), (KEYS[2], 2.0)]
    found = {path.name for path in store.folder(KEYS[1]).rglob("*") if path.is_file()}
    assert found == {"outcome.json", "studies.txt", "metrics.jsonl", "model.safetensors"}
    assert [store.studies(key) for key in KEYS[:3]] == [["alpha", "toy"], ["alpha", "gate"], ["gate"]]
    assert not list((store.place / "runs").glob(".*"))


def test_two_different_outcomes_of_a_run_are_named_and_nothing_is_copied(tmp_path, store):
    others = [Store(tmp_path / name) for name in ("one", "two")]
    fill(others[0], row(KEYS[0]), row(KEYS[1], accuracy=0.25))
    fill(others[1], row(KEYS[1], accuracy=0.75))
    with pytest.raises(ValueError, match=r"one.runs.*25.00%.*two.runs.*75.00%"):
        merge(store, others)
    assert store.rows() == []
    fill(store, row(KEYS[1], status="diverged", accuracy=None))
    with pytest.raises(ValueError, match="diverged"):
        merge(store, others[:1])
    assert [found.key for found in store.rows()] == [KEYS[1]]
