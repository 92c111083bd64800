"""The runner: who does which run, when to stop, and what happens to those that were stopped."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_images
from toy_study import grid, result

from nomax.console import Console
from nomax.study import load, named_setup
from nomax.study.engine import runner
from nomax.study.engine.experiment import ImageExperiment
from nomax.study.engine.runner import FLOP_PER_SECOND, START, Estimate, parse_seconds, spell_time
from nomax.study.engine.store import Store
from nomax.study.engine.worker import BUSY
from nomax.study.images.setup import SETUPS, Setup
from nomax.train import metrics
from nomax.train.console import Stop

TESTS = Path(__file__).parent
STEPS = 250  # of the runs in processes of their own: about a second
ENDLESS = 1_000_000
CODE = "import sys, tyro; from nomax.study.command import Options, run; sys.exit(run(tyro.cli(Options)))"
STUDY = [sys.executable, "-c", CODE]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_images.write(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture
def runs(tiny):
    setup = Setup("tiny", tiny, models=("mu",), patches=(8,), image_size=16, steps=5, batch_size=8, warmup=1)
    return grid(setup, (0, 1))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(runner, "TICK", 0.01)
    monkeypatch.setattr(runner, "LOOK_AGAIN", 0.05)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


class Pretended:
    """Does runs in no time: each look at one brings it nearer to its end, with the outcome that the test wants."""

    def __init__(self, store, limit=2, looks=2, code=0):
        self.store, self.limit, self.looks, self.code = store, limit, looks, code
        self.started, self.stopped, self.at_once = [], [], 0
        self.active = set()

    def start(self, run):
        self.started.append(run.key)
        self.active.add(run.key)
        self.at_once = max(self.at_once, len(self.active))
        return PretendedHandle(self, run)


class PretendedHandle:
    def __init__(self, launcher, run):
        self.launcher, self.run, self.looks, self.asked = launcher, run, launcher.looks, False

    def code(self):
        self.looks -= 1
        if self.looks > 0:
            return None
        self.launcher.active.discard(self.run.key)
        code = self.launcher.code(self.run) if callable(self.launcher.code) else self.launcher.code
        if self.asked:
            return 143
        if code == 0:
            self.launcher.store.finish(self.run.result("done", accuracy=0.5, loss=1.0, seconds=0.1))
        return code

    def stop(self):
        self.launcher.stopped.append(self.run.key)
        self.asked, self.looks = True, 1


def run_grid(runs, store, launcher, stop=None, **options):
    return runner.run_grid(runs, store, launcher, stop or Stop(), Console(quiet=True), study="toy", **options)


def keys(runs):
    return [run.key for run in runs]


class Alone(ImageExperiment):
    alone = True


def test_what_takes_times_goes_on_alone(runs, store):
    launcher, others = Pretended(store), []
    start = launcher.start
    launcher.start = lambda run: others.append((run.alone, len(launcher.active))) or start(run)
    run_grid([Alone(runs[0].config), *runs[1:4], Alone(runs[4].config)], store, launcher)
    assert [active for alone, active in others if alone] == [0, 0]
    assert len(others) == 5
    assert launcher.at_once == 2


def test_each_run_is_done_once_so_many_at_a_time_and_not_again(runs, store):
    launcher = Pretended(store)
    report = run_grid([*runs, runs[0]], store, launcher)
    assert launcher.started == keys(runs)
    assert launcher.at_once == 2
    assert sorted(found.key for found in report.finished) == sorted(keys(runs))
    assert (report.left, report.crashed) == ([], [])
    assert [found.key for found in store.results(study="toy")] == sorted(keys(runs))
    again = Pretended(store)
    assert run_grid(runs, store, again).finished == []
    assert again.started == []


def test_a_failed_run_is_left_alone_unless_told_to_retry(runs, store):
    store.finish(runs[0].result("failed", error="no luck"))
    store.finish(runs[1].result("diverged", diverged_at=2))
    launcher = Pretended(store)
    run_grid(runs, store, launcher)
    assert launcher.started == keys(runs[2:])
    launcher = Pretended(store)
    run_grid(runs, store, launcher, retry=True)
    assert launcher.started == keys(runs[:1])


def test_a_process_that_ends_without_an_outcome_does_not_stop_the_others(runs, store):
    launcher = Pretended(store, code=lambda run: 137 if run.key == runs[1].key else 0)
    report = run_grid(runs, store, launcher)
    assert keys(report.crashed) == keys(report.left) == [runs[1].key]
    assert len(report.finished) == len(runs) - 1


def test_a_run_that_another_process_holds_is_waited_for_and_taken_over(runs, store):
    class Later(Stop):
        looks = 0

        @property
        def exit_code(self):
            self.looks += 1
            if self.looks == 3:  # the other process is done with one of the two
                store.finish(runs[1].result("done", accuracy=0.25, loss=1.0))
            return 130 if self.looks > 40 else 0

    launcher = Pretended(store, limit=1)
    with store.claim(runs[0].key), store.claim(runs[1].key):
        report = run_grid(runs[:2], store, launcher, Later())
        assert launcher.started == []
        assert keys(report.left) == [runs[0].key]
        assert [found.accuracy for found in report.finished] == [0.25]
    run_grid(runs[:2], store, launcher)
    assert launcher.started == [runs[0].key]


def test_a_run_that_was_taken_in_the_last_moment_comes_again(runs, store):
    answers = iter([BUSY, BUSY, 0])
    launcher = Pretended(store, code=lambda run: next(answers))
    report = run_grid(runs[:1], store, launcher)
    assert launcher.started == [runs[0].key] * 3
    assert len(report.finished) == 1


def test_being_asked_to_stop_stops_what_goes_on_and_starts_nothing(runs, store):
    class Soon(Stop):
        looks = 0

        @property
        def exit_code(self):
            self.looks += 1
            return 130 if self.looks > 3 else 0

    launcher = Pretended(store, looks=1000)
    report = run_grid(runs, store, launcher, Soon())
    assert launcher.started == launcher.stopped == keys(runs[:2])
    assert keys(report.left) == keys(runs)


def test_the_budget_starts_only_what_will_end_in_time_and_stops_the_rest(runs, store, monkeypatch):
    monkeypatch.setattr("nomax.study.engine.runner.START", 0.1)
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 1000, sleep=lambda seconds: None)
    monkeypatch.setattr(runner, "time", clock)
    slow = replace(runs[0], config=replace(runs[0].config, steps=10**9))  # years
    launcher = Pretended(store)
    report = run_grid([slow, *runs[1:]], store, launcher, budget=60.0)
    assert launcher.started == keys(runs[1:])
    assert keys(report.left) == [slow.key]
    hanging = Pretended(store, looks=10**6)
    report = run_grid(runs[:1], store, hanging, budget=0.5)
    assert hanging.stopped == keys(runs[:1])
    assert keys(report.left) == keys(runs[:1])


def test_shards_are_a_partition_that_does_not_change_when_the_grid_grows(runs):
    parts = [runner.shard(runs, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(key for part in parts for key in keys(part)) == sorted(keys(runs))
    for number, part in enumerate(parts, 1):
        assert set(keys(runner.shard(runs[:3], f"{number}/3"))) <= set(keys(part))
    assert runner.shard(runs, None) == runs
    for wrong in ("0/3", "4/3", "3", "a/b", "1/0", "-1/2"):
        with pytest.raises(ValueError, match="--shard"):
            runner.shard(runs, wrong)


def test_times_are_estimated_from_the_finished_runs_that_are_most_similar(runs):
    run = runs[0]

    def took(seconds, variant="mu/8", data=run.config.data):
        return result(variant=variant, data=data, core_seconds=seconds, seconds=7e9, train_flops=run.flops)

    assert Estimate().seconds(run) == pytest.approx(START + run.flops / FLOP_PER_SECOND)
    another = took(90.0, variant="nano/4", data="others")
    assert Estimate([another]).seconds(run) == pytest.approx(START + 90)
    same_model = took(70.0, data="others")
    assert Estimate([another, same_model]).seconds(run) == pytest.approx(START + 70)
    same_data = took(50.0, variant="nano/4")
    assert Estimate([another, same_model, same_data]).seconds(run) == pytest.approx(START + 50)
    same = [took(seconds) for seconds in (1.0, 8.0, 1000.0)]
    assert Estimate([another, same_model, same_data, *same]).seconds(run) == pytest.approx(START + 8)
    assert Estimate([another, same_model, same_data, *same]).seconds(run, 0.25) == pytest.approx(START + 2)
    assert Estimate([replace(another, status="diverged")]).seconds(run) == Estimate().seconds(run)
    old = replace(another, core_seconds=0.0, seconds=30.0)
    assert Estimate([old]).seconds(run) == pytest.approx(START + 30)


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("90m", 5400), ("1h30m", 5400), ("45", 45), ("1.5 min", 90)]
)
def test_a_budget_is_a_time_as_people_write_it(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "2 weeks", "-3h", "0s", "h", "1h30", "5 5"])
def test_a_budget_that_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="--budget"):
        parse_seconds(text)


def test_times_are_said_in_words():
    assert [spell_time(seconds) for seconds in (4.2, 99, 600, 5400, 7500)] == [
        "4 s",
        "99 s",
        "10 min",
        "90 min",
        "2 h 05 min",
    ]


def test_a_setup_takes_other_values_and_what_follows_from_them(tiny):
    setup = SETUPS["hour"].adapted(data=tiny, model=("S/8", "B/4", "S/4"), steps=10, seeds=None)
    assert (setup.image_size, setup.models, setup.patches, setup.steps, setup.warmup) == (16, ("S", "B"), (8, 4), 10, 2)
    assert SETUPS["hour"].adapted(data=tiny).patches == (8, 4, 2)
    assert setup.seeds == SETUPS["hour"].seeds
    assert SETUPS["hour"].adapted(steps=4).warmup == 1  # 0 would be the recipe's
    assert setup.adapted(recipe="i21k").steps == 0
    with pytest.raises(ValueError, match="--patches"):
        SETUPS["hour"].adapted(image_size=50)
    with pytest.raises(ValueError, match="did you mean hour"):
        named_setup(load("alpha"), "hou")


def start(store, tiny, *more, steps=STEPS):
    """`nomax study` in a process group of its own, as a terminal starts it."""
    options = [
        "--data",
        tiny,
        "--model",
        "mu/8",
        "--steps",
        str(steps),
        "--batch-size",
        "8",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    words = [
        *STUDY,
        str(TESTS / "toy_study.py"),
        *options,
        "--store",
        str(store.place),
        "--out",
        str(store.place / "out"),
        *more,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
    )


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def going(store, step):
    """The runs that are beyond a step and not finished."""
    folders = [path.parent for path in (store.place / "runs").glob("*/metrics.jsonl")]
    return [f for f in folders if not (f / "outcome.json").exists() and metrics.last(f).get("step", 0) > step]


def stories(store):
    return [json.loads((store.folder(key) / "run.json").read_text()) for key in store.finished()]


def test_two_processes_share_a_store_and_one_that_is_killed_is_replaced(tiny, store):
    first = start(store, tiny)
    wait_for(lambda: going(store, 60), first)
    os.killpg(first.pid, signal.SIGSTOP)  # it holds its run, and the second cannot come too late to see it
    second = start(store, tiny)
    wait_for(lambda: store.finished() or len(going(store, 0)) == 2, second)  # which is at work too
    os.killpg(first.pid, signal.SIGKILL)
    first_said, said = first.communicate()[0], second.communicate()[0]
    assert second.returncode == 0, said
    results = store.results()
    assert len(results) == 3
    assert {found.status for found in results} == {"done"}
    for found in results:
        steps = [line["step"] for line in metrics.read(store.folder(found.key)) if "loss" in line]
        assert steps == list(range(1, STEPS + 1))
    # Nobody did a run that was done or held by the other: only the killed one was started a second time.
    assert sum(len(story["continued"]) for story in stories(store)) == 1
    assert first_said.count("right in") + said.count("right in") == 3
    assert (store.place / "out" / "study.json").exists()


def test_a_killed_runner_and_ctrl_c_leave_checkpoints_from_which_the_same_command_goes_on(tiny, store):
    process = start(store, tiny, steps=ENDLESS)
    wait_for(lambda: going(store, 60), process)
    (folder,) = going(store, 60)
    process.kill()
    process.communicate()  # which ends when the last process that could write there has ended
    assert not store.busy(folder.name)
    killed_at = metrics.last(folder)["step"]
    assert (folder / "checkpoints" / f"step-{killed_at:08}.pt").exists()

    process = start(store, tiny, steps=ENDLESS)
    wait_for(lambda: going(store, killed_at), process)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "goes on" in said
    last = metrics.last(folder)["step"]
    assert killed_at < last < ENDLESS
    assert [path.name for path in folder.glob("checkpoints/*.pt")] == [f"step-{last:08}.pt"]
    assert [line["step"] for line in metrics.read(folder) if "loss" in line] == list(range(1, last + 1))
    assert store.results() == []
