"""The store: run folders are the truth, and many may work in it."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
from filelock import FileLock
from toy_study import result

from nomax import _files
from nomax.study.engine.result import Result, where
from nomax.study.engine.store import Store, merge
from nomax.study.manage import Export, Merge

KEYS = [f"{number:016x}" for number in range(6)]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def fill(store, *results, study="toy"):
    for one in results:
        store.finish(one)
    store.belongs([one.key for one in results], study)


def test_a_row_survives_its_way_through_json():
    full = result(gate="silu", probes={"digits": 0.25}, ten_shot=0.25, error="é | “x”\n", diverged_at=3)
    assert Result.from_json(full.to_json()) == full


def changed(**values):
    """An outcome.json with other values."""
    return json.dumps({**json.loads(result(KEYS[0]).to_json()), **values})


DEEP = "[" * 100_000
# What a broken disk, a careless script or somebody's malice may leave in place of an outcome.
BAD = {
    "nothing": "",
    "no object": "[]",
    "a string": '"task"',
    "no value": "{}",
    "almost no value": '{"status": "done"}',
    "cut off": result(KEYS[0]).to_json()[:-9],
    "not UTF-8": b"\xff\xfe{}",
    "zeros": b"\0" * 900,
    "an unknown status": changed(status="odd"),
    "NaN": changed(loss=math.nan),
    "infinity": changed(accuracy=math.inf),
    "NaN in a probe": changed(probes={"digits": math.nan}),
    "too large for a float": changed(loss=0).replace('"loss": 0', '"loss": 1e999'),
    "an integer too large for a float": changed(lr=10**400),
    "an integer beyond all bounds": changed(train_flops=10**300),
    "an integer of too many digits": changed(steps=0).replace('"steps": 0', f'"steps": {"9" * 5000}'),
    "a text for a number": changed(loss="1.25"),
    "a text for an integer": changed(seed="0"),
    "a number for a text": changed(phi=1),
    "a float for an integer": changed(steps=1.5),
    "a truth for an integer": changed(seed=True),
    "an integer for a truth": changed(qk_norm=1),
    "a list for a number": changed(accuracy=[0.5]),
    "an object for a text": changed(variant={"a": 1}),
    "a list of probes": changed(probes=[["digits", 0.5]]),
    "a text among the probes": changed(probes={"digits": "half"}),
    "nothing for a number": changed(lr=None),
    "a negative number of steps": changed(steps=-1),
    "done without a loss": changed(loss=None),
    "half a character": changed(error="").replace('"error": ""', '"error": "\\ud800"'),
    "another run": changed(key=KEYS[5]),
    "another kind of run": changed(task="translate"),
    "deep": DEEP,
    "deep objects": '{"a":' * 100_000,
    "deep in a column": changed(probes=0).replace('"probes": 0', f'"probes": {"[" * 900}{"]" * 900}'),
    "a gigabyte's beginning": " " * (2**20 + 1),
}


@pytest.mark.parametrize("kind", [*BAD, "a folder", "a pipe"])
def test_an_outcome_that_cannot_be_one_is_named_and_never_accepted(kind, tmp_path, store, capsys):
    fill(store, result(KEYS[0]), result(KEYS[1]))
    path = store.folder(KEYS[0]) / "outcome.json"
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(BAD[kind] if isinstance(BAD[kind], bytes) else BAD[kind].encode())
    assert store.outcome(KEYS[0]) is None
    assert [found.key for found in store.results()] == [KEYS[1]]
    told = capsys.readouterr().err
    assert told.count("nomax study: ") == 1
    assert f"{path} cannot be read: " in told
    assert "Put a copy there that can, or remove it. Until then this run counts as not done" in told
    assert len(told) < 1000

    assert Export(store=store.place).run() == 0
    printed = capsys.readouterr()
    assert KEYS[1] in printed.out
    assert KEYS[0] not in printed.out
    assert f"{path} cannot be read: " in printed.err

    target = Store(tmp_path / "target")
    assert Merge((store.place,), target.place).run() == 2
    assert re.match(rf"nomax study merge: {path} .* remove it\.$", capsys.readouterr().err)
    assert not list(target.place.rglob("*.json"))
    assert Merge((other_store(tmp_path, result(KEYS[0])),), store.place).run() == 2
    assert f"nomax study merge: {path} cannot be read: " in capsys.readouterr().err


def other_store(tmp_path, *results):
    other = Store(tmp_path / "other")
    fill(other, *results)
    return other.place


def test_studies_that_cannot_be_read_are_told_and_cost_no_run(tmp_path, store, capsys):
    fill(store, result(KEYS[0]), result(KEYS[1]))
    (store.folder(KEYS[0]) / "studies.txt").write_bytes(b"\xff")
    assert [found.key for found in store.results()] == KEYS[:2]
    assert [found.key for found in store.results(study="toy")] == [KEYS[1]]
    assert "studies.txt cannot be read" in capsys.readouterr().err
    target = Store(tmp_path / "target")
    assert merge(target, [store]) == KEYS[:2]
    assert [target.studies(key) for key in KEYS[:2]] == [[], ["toy"]]


def test_where_finds_rows_by_their_values_and_refuses_unknown_fields():
    results = [result(alpha=0.1 + 0.2, seed=1), result(alpha=1.0), result(alpha=1.0, gate="silu")]
    assert where(results, alpha=0.3) == results[:1]
    assert where(results, alpha=1, gate=None) == [results[1]]
    with pytest.raises(TypeError, match="alhpa"):
        where(results, alhpa=1)


def test_rows_come_in_the_order_asked_for(store):
    results = [result(key, seed=number) for number, key in enumerate(KEYS)]
    fill(store, *results)
    assert store.results([KEYS[3], KEYS[1], "f" * 16]) == [results[3], results[1]]
    assert store.results() == results


def test_a_run_may_be_part_of_several_studies(store):
    fill(store, result(KEYS[0]), result(KEYS[1]), study="alpha")
    store.belongs([KEYS[1], KEYS[5]], "gate")
    store.belongs([KEYS[1]], "gate")
    store.belongs([KEYS[0]], "my own")
    assert [found.key for found in store.results(study="my own")] == [KEYS[0]]
    assert [found.key for found in store.results(study="gate")] == [KEYS[1]]
    assert store.studies(KEYS[1]) == ["alpha", "gate"]


def test_a_database_that_an_older_nomax_left_is_ignored(store, capsys):
    results = [result(key) for key in KEYS]
    fill(store, *results)
    (store.place / "results.sqlite").write_bytes(b"not a database at all")
    assert Store(store.place).results() == results
    assert (store.place / "results.sqlite").read_bytes() == b"not a database at all"
    assert not capsys.readouterr().err


def test_rows_follow_the_folders_whatever_happened_between(store):
    fill(store, result(KEYS[0]), result(KEYS[1], status="failed", accuracy=None))
    store.results()
    store.finish(result(KEYS[2]))  # and then the process died
    store.reopen(KEYS[1])
    store.finish(result(KEYS[0], accuracy=0.75))
    assert [(found.key, found.accuracy) for found in store.results()] == [(KEYS[0], 0.75), (KEYS[2], 0.5)]


def test_a_run_whose_outcome_was_damaged_is_in_no_table_and_told_once(store, capsys):
    fill(store, result(KEYS[0]), result(KEYS[1]))
    store.results()
    (store.folder(KEYS[0]) / "outcome.json").write_text("{")
    for _ in range(3):
        assert [found.key for found in store.results()] == [KEYS[1]]
    assert capsys.readouterr().err.count("cannot be read") == 1


def test_many_writers_lose_nothing(store):
    failures = []

    def write(number):
        try:
            mine = Store(store.place)
            for part in range(5):
                fill(mine, result(f"{number * 100 + part:016x}", seed=part), study=f"study-{number}")
                mine.results()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store.results()) == 40


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
    fill(store, result(KEYS[0]))
    fill(others[0], result(KEYS[0], seconds=9.0), result(KEYS[1], seed=1), study="alpha")
    fill(
        others[1], result(KEYS[1], seed=1, seconds=7.0), result(KEYS[2], status="diverged", accuracy=None), study="gate"
    )
    for name in ("metrics.jsonl", "model/model.safetensors", "checkpoints/step-00000001.pt", ".lock"):
        path = others[0].folder(KEYS[1]) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (store.place / "runs" / ".merge" / "new" / KEYS[1]).mkdir(parents=True)  # of a merge that was killed
    (others[1].folder(KEYS[3])).mkdir()  # not finished
    assert merge(store, others) == KEYS[1:3]
    assert merge(store, others) == []
    results = store.results()
    assert [(found.key, found.seconds) for found in results] == [(KEYS[0], 2.0), (KEYS[1], 2.0), (KEYS[2], 2.0)]
    found = {path.name for path in store.folder(KEYS[1]).rglob("*") if path.is_file()}
    assert found == {"outcome.json", "studies.txt", "metrics.jsonl", "model.safetensors"}
    assert [store.studies(key) for key in KEYS[:3]] == [["alpha", "toy"], ["alpha", "gate"], ["gate"]]
    assert not list((store.place / "runs").glob(".*"))


def test_two_different_outcomes_of_a_run_are_named_and_nothing_is_copied(tmp_path, store):
    others = [Store(tmp_path / name) for name in ("one", "two")]
    fill(others[0], result(KEYS[0]), result(KEYS[1], accuracy=0.25))
    fill(others[1], result(KEYS[1], accuracy=0.75))
    with pytest.raises(ValueError, match=r"one.runs.*25.00%.*two.runs.*75.00%"):
        merge(store, others)
    assert store.results() == []
    fill(store, result(KEYS[1], status="diverged", accuracy=None))
    with pytest.raises(ValueError, match="diverged"):
        merge(store, others[:1])
    assert [found.key for found in store.results()] == [KEYS[1]]


def test_runs_that_differ_in_anything_but_times_are_different(tmp_path, store):
    fill(store, result(KEYS[0], probes={"digits": 0.5}))
    for number, (name, value) in enumerate(
        {"loss": 1.5, "probes": {"digits": 0.25}, "ten_shot": 0.5, "lr": 2e-3, "diverged_at": 3}.items()
    ):
        other = Store(tmp_path / f"other-{number}")
        fill(other, result(KEYS[0], **{"probes": {"digits": 0.5}, name: value}))
        with pytest.raises(
            ValueError, match=rf"two different outcomes of the run {KEYS[0]}.*differ in {name}\. Remove"
        ):
            merge(store, [other])
    same = Store(tmp_path / "same")
    fill(same, result(KEYS[0], probes={"digits": 0.5}, seconds=9.0, core_seconds=8.0, error="a word"))
    assert merge(store, [same]) == []


def contents(store):
    """All files of a store but its locks, and what is in them."""
    paths = [path for path in (store.place / "runs").rglob("*") if path.suffix != ".lock"]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def two_stores(tmp_path, store):
    """A store with a finished and an unfinished run, and one to copy from, which has three."""
    fill(store, result(KEYS[0]))
    (store.folder(KEYS[2]) / "checkpoints").mkdir(parents=True)
    (store.folder(KEYS[2]) / "checkpoints" / "step-00000001.pt").write_text("half of the way")
    other = Store(tmp_path / "other")
    fill(other, *(result(key) for key in KEYS[1:4]))
    (other.folder(KEYS[2]) / "model").mkdir()
    (other.folder(KEYS[2]) / "model" / "model.safetensors").write_text("weights")
    return other


def assert_nothing_is_copied(store, other, capsys, message):
    before = contents(store)
    assert Merge((other.place,), store.place).run() == 2
    assert message in capsys.readouterr().err
    assert contents(store) == before


@pytest.mark.parametrize(
    "what", ["outcome.json", "model/model.safetensors", "model", "studies.txt", "nothing", "", "runs"]
)
def test_a_symbolic_link_is_named_and_not_followed(what, tmp_path, store, capsys):
    other = two_stores(tmp_path, store)
    path = other.place / "runs" if what == "runs" else other.folder(KEYS[2]) / what
    if path.exists():
        os.replace(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")  # which is nowhere for "nothing"
    assert_nothing_is_copied(store, other, capsys, f"nomax study merge: {path} is a symbolic link")


def test_a_link_to_checkpoints_which_are_not_copied_does_not_matter(tmp_path, store):
    other = two_stores(tmp_path, store)
    (other.folder(KEYS[2]) / "checkpoints").symlink_to(tmp_path)
    assert merge(store, [other]) == KEYS[1:4]
    assert not (store.folder(KEYS[2]) / "checkpoints").exists()


def test_a_pipe_is_not_waited_for(tmp_path, store, capsys):
    other = two_stores(tmp_path, store)
    os.mkfifo(other.folder(KEYS[2]) / "model" / "pipe")
    assert_nothing_is_copied(store, other, capsys, "pipe is neither a file nor a folder")


@pytest.mark.parametrize("key", KEYS[1:4])
def test_nothing_is_copied_while_somebody_works_on_one_of_the_runs(key, tmp_path, store, capsys):
    other = two_stores(tmp_path, store)
    with store.claim(key) as free:
        assert free
        assert_nothing_is_copied(store, other, capsys, f"somebody works on the run {key}")
    assert merge(store, [other]) == KEYS[1:4]


def test_two_merges_do_not_meet(tmp_path, store, capsys):
    other = two_stores(tmp_path, store)
    with FileLock(store.place / "merge.lock"):
        assert_nothing_is_copied(store, other, capsys, "another merge into")


@pytest.mark.parametrize(
    ("name", "call"),
    [*(("copytree", call) for call in (1, 2, 3)), *(("replace", call) for call in (1, 2, 3, 4)), ("sync_folder", 1)],
)
def test_a_merge_that_fails_leaves_all_as_it_was(name, call, tmp_path, store, capsys, monkeypatch):
    """The calls are three copies, then a rename of each run and one of the unfinished run, and a sync at the end."""
    other = two_stores(tmp_path, store)
    places = {"copytree": shutil, "replace": os, "sync_folder": _files}
    real, calls = getattr(places[name], name), 0

    def failing(*arguments, **settings):
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(28, "No space left on device")
        return real(*arguments, **settings)

    monkeypatch.setattr(places[name], name, failing)
    assert_nothing_is_copied(store, other, capsys, "No space left on device")
    assert calls >= call
    monkeypatch.undo()
    assert merge(store, [other]) == KEYS[1:4]
    assert [found.key for found in store.results()] == KEYS[:4]
