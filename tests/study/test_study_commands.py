"""`nomax study` and its kin, as their users meet them."""

import csv
import errno
import io
import itertools
import json
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_images
import toy_study
import tyro
from PIL import Image

from nomax.study import STUDIES, load
from nomax.study import command as run_command
from nomax.study.engine.publication import Publication
from nomax.study.engine.publish import note, publish, redraw
from nomax.study.engine.store import Store
from nomax.study.engine.verdict import Verdict
from nomax.study.images.setup import SETUPS
from nomax.study.manage import Draw, Export, List, Merge

TOY = str(Path(toy_study.__file__))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_images.write(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def small(tiny):
    """Options that make a study of six runs of seconds."""
    return [
        TOY,
        "--data",
        tiny,
        "--model",
        "mu/8",
        "--steps",
        "4",
        "--batch-size",
        "8",
        "--seeds",
        "2",
        "--warmup",
        "1",
    ]


@pytest.fixture(scope="module")
def done(tmp_path_factory, small):
    """The folder of a study that has been run."""
    folder = tmp_path_factory.mktemp("done")
    assert study(*small, "--store", str(folder / "store"), "--out", str(folder / "out")) == 0
    return folder


def study(*words, command=run_command):
    if command is run_command:
        return run_command.run(tyro.cli(run_command.Options, args=list(words)))
    return tyro.cli(command, args=list(words)).run()


def read(path):
    return json.loads(path.read_text())


def test_figures_are_drawn_again_from_the_results_alone(done, tmp_path, capsys):
    shutil.copytree(done / "out", tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out" / "toy.png").unlink()
    (tmp_path / "out" / "toy.svg").write_text("an older look")
    assert study(str(tmp_path), command=Draw) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert "toy.svg" in capsys.readouterr().out


def test_figures_of_other_numbers_are_not_drawn(done, tmp_path, capsys):
    shutil.copytree(done / "out", tmp_path / "out")
    about = read(tmp_path / "out" / "study.json")
    about["figures"][0]["table"]["rows"][0][1] = 0.123
    (tmp_path / "out" / "study.json").write_text(json.dumps(about))
    (tmp_path / "out" / "toy.svg").write_text("an older look")
    assert study(str(tmp_path / "out"), command=Draw) == 2
    assert "the table behind toy.svg is not what `nomax study toy-study` makes of these runs" in capsys.readouterr().err
    assert (tmp_path / "out" / "toy.svg").read_text() == "an older look"
    (tmp_path / "out" / "study.json").write_text('{"name": "alpha"}')
    assert study(str(tmp_path / "out"), command=Draw) == 2
    assert "out does not hold what `nomax study` writes: KeyError('command')" in capsys.readouterr().err
    assert study(str(tmp_path / "nothing"), command=Draw) == 2
    assert "nothing is no folder" in capsys.readouterr().err


def test_a_study_is_run_published_and_judged_by_one_command(done, small):
    out, results = done / "out", Store(done / "store").results()
    names = {
        "study.json",
        "runs.json",
        "runs.csv",
        "curves.json",
        "diagnostics.json",
        "verdicts.json",
        "verdicts.md",
        "toy.svg",
        "toy.png",
    }
    names |= {"rows_statistics.json", "maps.svg"}
    assert {path.name for path in out.iterdir()} == names
    about = read(out / "study.json")
    assert (about["name"], about["title"], about["claims"]) == ("toy-study", toy_study.TITLE, ["W-h"])
    assert about["text"].startswith("Does it matter which φ")
    assert about["runs"] == {"done": 6, "diverged": 0, "failed": 0, "missing": 0}
    assert about["command"].split()[:2] == ["nomax", "study"]
    assert set(small) <= set(about["command"].split())
    assert "--store" not in about["command"]
    assert about["setup"]["steps"] == 4
    assert about["machine"]["cores"] >= 1
    assert about["started"] <= about["finished"]
    (figure,) = about["figures"]
    assert (figure["file"], figure["alternative"]) == ("toy.svg", "A line.")
    assert len(figure["table"]["rows"]) == 6
    assert (out / "toy.png").read_bytes().startswith(b"\x89PNG")
    assert {entry["key"] for entry in read(out / "runs.json")} == {result.key for result in results}
    assert [line["accuracy"] for line in csv.DictReader(io.StringIO((out / "runs.csv").read_text()))] == [
        str(entry["accuracy"]) for entry in read(out / "runs.json")
    ]
    (verdict,) = read(out / "verdicts.json")
    assert verdict["sentence"] == "6 runs say nothing."
    assert "| **undecided** | 6 runs say nothing. |" in (out / "verdicts.md").read_text()
    curves = read(out / "curves.json")
    assert {curve["label"] for curve in curves} == {
        f"{phi}, mu/8, seed 0" for phi in ("softmax", "relu/L", "identity/L")
    }
    assert all(curve["steps"] == [1, 2, 3, 4] and len(curve["loss"]) == 4 for curve in curves)
    looked = read(out / "rows_statistics.json")
    assert [entry["label"] for entry in looked] == [
        result["phi"] + ", mu/8, seed 0" for result in read(out / "runs.json")[:3]
    ]
    assert looked[0]["layers"][0]["row_sum"] == pytest.approx(1)  # of softmax
    assert "prefers-color-scheme: dark" in (out / "maps.svg").read_text()


def test_the_command_that_is_written_down_gives_the_same_study(done, tmp_path, capsys):
    words = read(done / "out" / "study.json")["command"].split()[2:]
    assert study(*words, "--store", str(done / "store"), "--dry-run") == 0
    assert "0 of 6 runs to do" in capsys.readouterr().out


def test_what_is_done_is_not_done_again_and_the_verdicts_are_printed(done, small, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in (done / "store").rglob("outcome.json")}
    assert study(*small, "--store", str(done / "store"), "--out", str(tmp_path)) == 0
    told = capsys.readouterr().out
    assert "6 of the 6 runs have been done before" in told
    assert "undecided" in told
    assert str(tmp_path) in told.replace("\n", "")
    assert {path: path.stat().st_mtime_ns for path in (done / "store").rglob("outcome.json")} == before
    for name in ("runs.json", "verdicts.json", "curves.json", "study.json", "toy.svg"):
        assert (tmp_path / name).read_bytes() == (done / "out" / name).read_bytes()


def test_a_dry_run_lists_the_runs_with_their_times_and_makes_nothing(small, tmp_path, capsys):
    assert study(*small, "--store", str(tmp_path / "store"), "--dry-run", "--jobs", "2") == 0
    told = capsys.readouterr().out
    for number, phi in ((0, "softmax"), (1, "identity/L")):
        assert f"{phi}, mu/8, seed {number}" in told
    assert "6 of 6 runs to do: 12 s of computing, about 6 s with 2 at a time" in told.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_shards_in_stores_of_their_own_are_merged_into_the_whole(small, tmp_path, capsys):
    stores = [str(tmp_path / name) for name in ("one", "two")]
    out = ["--out", str(tmp_path / "out")]
    published = False
    for number, store in enumerate(stores, 1):
        assert study(*small, "--store", store, "--shard", f"{number}/2", *out) == 0
        alone = len(Store(store).results()) == 6  # it may happen: where a run goes depends on its key, so on the folder
        assert ("nomax study merge" in capsys.readouterr().out) == (not alone)
        published = published or alone
        assert (tmp_path / "out").exists() == published
    assert sum(len(Store(store).results()) for store in stores) == 6
    whole = str(tmp_path / "whole")
    assert study(*stores, "--store", whole, command=Merge) == 0
    assert "6 runs are new" in capsys.readouterr().out
    assert study(*small, "--store", whole, *out) == 0
    assert "6 of the 6 runs have been done before" in capsys.readouterr().out
    assert read(tmp_path / "out" / "study.json")["runs"]["done"] == 6


def test_a_budget_too_small_for_anything_publishes_what_is_there(small, tmp_path, capsys):
    out = tmp_path / "out"
    assert study(*small, "--store", str(tmp_path / "store"), "--out", str(out), "--budget", "1s") == 0
    told = capsys.readouterr().out
    assert "6 runs are left" in told
    assert f"nomax report {out}" in told
    about = read(out / "study.json")
    assert about["runs"] == {"done": 0, "diverged": 0, "failed": 0, "missing": 6}
    assert about["note"] == "preliminary: 6 runs are missing"
    assert "**preliminary: 6 runs are missing**" in (out / "verdicts.md").read_text()


def test_fewer_runs_do_not_replace_the_results_of_more(done, small, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(done / "out", out)
    before = (out / "study.json").read_bytes()
    assert json.loads(before)["note"] == ""
    words = ["--out", str(out), "--store", str(tmp_path / "store"), "--budget", "1s", "--fresh"]
    assert study(*small, *words) == 1  # the same set-up: known only afterwards
    assert "6 runs" in capsys.readouterr().err
    assert study(*small, "--steps", "5", "--seeds", "1", *words) == 2  # another one, which has but three
    said = capsys.readouterr().err
    assert "--out" in said
    assert "6 runs" in said
    assert (out / "study.json").read_bytes() == before
    smoke = json.loads(before)
    smoke["setup"]["name"] = "smoke"
    (out / "study.json").write_text(json.dumps(smoke))
    assert study(*small, "--steps", "5", "--seeds", "1", *words) == 0  # those of a smoke run give way
    assert read(out / "study.json")["runs"]["missing"] == 3


def test_published_runs_count_as_done_where_the_store_lacks_them(done, small, tmp_path, capsys):
    """As in a fresh clone, which adds a seed to committed results."""
    out, store = tmp_path / "out", tmp_path / "store"
    shutil.copytree(done / "out", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    where = ["--store", str(store), "--out", str(out)]
    assert study(*small, *where, "--dry-run") == 0
    assert "6 runs are taken over from" in (told := capsys.readouterr().out)
    assert "0 of 6 runs to do" in told
    assert study(*small, *where, "--dry-run", "--fresh") == 0
    assert "6 of 6 runs to do" in capsys.readouterr().out
    assert study(*small, *where) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert not list((store / "runs").iterdir())
    (more := list(small))[more.index("--seeds") + 1] = "3"
    assert study(*more, *where) == 0
    assert len(Store(store).finished()) == 3
    assert read(out / "study.json")["runs"] == {"done": 9, "diverged": 0, "failed": 0, "missing": 0}
    for name in ("curves.json", "rows_statistics.json", "maps.svg"):  # of the first seed, whose folders are gone
        assert (out / name).read_bytes() == before[name]
    old, new = json.loads(before["study.json"]), read(out / "study.json")
    assert (new["started"], new["finished"] >= old["finished"]) == (old["started"], True)
    assert read(out / "runs.json")[:6] == json.loads(before["runs.json"])


def test_runs_that_a_study_beside_it_has_published_count_as_done(done, small, tmp_path, capsys):
    other, mine = tmp_path / "results" / "other", tmp_path / "results" / "mine"
    shutil.copytree(done / "out", other)
    assert study(*small, "--store", str(tmp_path / "store"), "--out", str(mine)) == 0
    assert "6 runs are taken over from" in capsys.readouterr().out
    assert not list((tmp_path / "store" / "runs").iterdir())
    for name in ("runs.json", "curves.json", "verdicts.json"):
        assert (mine / name).read_bytes() == (other / name).read_bytes()
    abouts = [read(folder / "study.json") for folder in (mine, other)]
    for name in ("machine", "versions", "started", "finished"):
        assert abouts[0][name] == abouts[1][name]


def test_a_damaged_publication_is_refused_with_a_way_out(done, small, tmp_path, capsys):
    shutil.copytree(done / "out", tmp_path / "out")
    where = ["--store", str(done / "store"), "--out", str(tmp_path / "out")]
    for content in ('[{"key": "x"}]', "[", '[{"key": "0000000000000000", "measurement": "a"}]'):
        (tmp_path / "out" / "runs.json").write_text(content)
        assert study(*small, *where) == 2
        assert "--fresh" in capsys.readouterr().err
    assert study(*small, *where, "--fresh") == 0


def test_diagnostics_are_published_thinned_and_kept_and_reach_the_figures(done, tmp_path, monkeypatch):
    store, out = tmp_path / "store", tmp_path / "out"
    shutil.copytree(done / "store", store)
    key = read(done / "out" / "runs.json")[0]["key"]
    for path in store.glob("runs/*/diagnostics.jsonl"):
        path.unlink()
    lines = [json.dumps({"step": step, "row_sum": [step / 3, 1.0]}) for step in range(250)]
    lines += [json.dumps({"step": 249, "row_sum": [float("nan"), 2.0]}), '{"step": 250, "row']
    (store / "runs" / key / "diagnostics.jsonl").write_text("\n".join(lines))
    module, setup = load(TOY), SETUPS["default"]
    drawn, plain_figures = [], module.figures

    def figures(results, setup, diagnostics):
        drawn.append(diagnostics)
        return plain_figures(results, setup)

    monkeypatch.setattr(module, "figures", figures)
    runs = [SimpleNamespace(key=result["key"]) for result in read(done / "out" / "runs.json")]
    words = {"name": "toy-study", "out": out, "command": f"nomax study {TOY}"}
    publish(module, setup, runs, Store(store), **words)
    (entry,) = read(out / "diagnostics.json")
    assert (entry["key"], entry["label"], len(entry["points"])) == (key, "softmax, mu/8, seed 0", 100)
    assert entry["points"][0] == {"step": 0, "row_sum": [0.0, 1.0]}
    assert entry["points"][-1] == {"step": 249, "row_sum": [None, 2.0]}  # as it was done last
    assert drawn == [{key: entry["points"]}]
    written = (out / "diagnostics.json").read_bytes()
    (store / "runs" / key / "diagnostics.jsonl").unlink()
    publish(module, setup, runs, Store(store), **words, before=Publication.read(out))
    assert (out / "diagnostics.json").read_bytes() == written
    monkeypatch.setattr("nomax.study.load", lambda name: module)
    redraw(out)
    assert drawn[2] == drawn[0]
    publish(module, setup, runs, Store(store), **words)
    assert not (out / "diagnostics.json").exists()


def test_a_plan_tells_hours_noise_and_the_seeds_that_a_claim_needs(done, small, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    where = ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    assert study(*small, *where, "--plan") == 2  # nothing is known yet but the hours
    captured = capsys.readouterr()
    assert "6 runs, 0.0 core-hours in all; 6 to do" in captured.out
    assert "A pilot tells it: the same command with --seeds 2" in captured.err
    assert not list(tmp_path.iterdir())
    text = Path(TOY).read_text().replace("{})", "{}, comparisons={'relu minus softmax': GAIN})")
    text = text.replace('{"runs": len(results)})]', "{}, comparisons={'relu minus softmax': GAIN})]")
    gain = "from nomax.study.engine.statistics import Comparison\nGAIN = Comparison(0.02, 0.01, 1, 2, (0.0,), 0.01)\n"
    (tmp_path / "mine.py").write_text(text.replace("TITLE =", f"{gain}TITLE =", 1))
    shutil.copytree(done / "out", tmp_path / "out")
    assert study(str(tmp_path / "mine.py"), *small[1:], "--seeds", "4", *where, "--plan") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "6 runs are taken over" in told
    assert "12 runs, 0.0 core-hours in all; 6 to do" in told
    assert "between seeds of the runs of this plan" in told
    assert "W-h relu minus softmax 1.59 points 1.00 points 7 0.0" in told
    assert study(*small[:3], "--smoke", *where, "--plan") == 2


def test_a_study_of_ones_own_judges_claims_of_its_own(tmp_path):
    text = Path(TOY).read_text().replace('"W-h"', '"better"')
    (tmp_path / "my own.py").write_text(text.replace('{"runs": len(results)})', '{}, text="Mine is better.")'))
    module = load(str(tmp_path / "my own.py"))
    publish(
        module,
        SETUPS["default"],
        [],
        Store(tmp_path / "store"),
        name="my own",
        out=tmp_path / "out",
        command="nomax study",
    )
    (verdict,) = read(tmp_path / "out" / "verdicts.json")
    assert list(verdict)[:3] == ["claim", "text", "verdict"]
    assert (verdict["claim"], verdict["text"]) == ("better", "Mine is better.")
    assert Verdict("better", "undecided", "", "", [], {}).text == "better"
    assert Verdict("W-h", "undecided", "", "", [], {}).text.startswith("No h")


def test_a_smoke_run_is_called_one_wherever_its_verdicts_are():
    assert note(SETUPS["smoke"], 0) == "smoke: these verdicts mean nothing"
    assert note(SETUPS["smoke"], 1) == "smoke: these verdicts mean nothing; preliminary: 1 run is missing"
    assert note(SETUPS["hour"], 0) == ""


@pytest.mark.parametrize("option", ["--store", "--out"])
def test_a_place_that_cannot_be_written_to_is_told_before_the_first_run(option, small, tmp_path, capsys):
    (tmp_path / "file").touch()
    places = {"--store": tmp_path / "store", "--out": tmp_path / "out", option: tmp_path / "file"}
    assert study(*small, *(str(word) for pair in places.items() for word in pair)) == 2
    assert f"{option} {tmp_path / 'file'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_told_without_a_traceback(small, tmp_path, capsys, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "outcome.json")

    monkeypatch.setattr(run_command, "run_grid", full)
    assert study(*small, "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")) == 1
    assert "No space left on device: 'outcome.json'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("TITLE = (", "mine.py, line 1"), ("TITLE, CLAIMS, figures = '', (), list", "mine.py has no grid, verdicts")],
)
def test_a_file_that_is_no_study_is_told_apart(text, message, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(text)
    assert study(str(tmp_path / "mine.py"), "--dry-run") == 2
    assert message in capsys.readouterr().err


def test_a_study_whose_runs_all_fail_says_how_to_try_again_and_is_no_success(small, tmp_path, capsys, monkeypatch):
    class Failing(run_command.Processes):
        def start(self, run):
            Store(tmp_path / "store").finish(run.result("failed", error="no luck"))
            return SimpleNamespace(code=lambda: 0, stop=lambda: None)

    monkeypatch.setattr(run_command, "Processes", Failing)
    where = ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    assert study(*small, *where) == 1
    assert "the same command with --retry" in capsys.readouterr().out
    assert study(*small, *where) == 0  # nothing new was tried


def write_photos(folder, splits):
    for split, name, shade in itertools.product(splits, ("dark", "light"), (10, 20)):
        path = folder / split / name / f"{shade}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (shade * (1 + 4 * (name == "light")),) * 3).save(path)
    return str(folder)


def test_a_folder_of_images_of_any_size_can_be_studied(tmp_path, capsys):
    photos = write_photos(tmp_path / "photos", ("train", "test"))
    words = [TOY, "--smoke", "--data", photos, "--patches", "112", "--seeds", "1", "--store", str(tmp_path / "store")]
    assert study(*words) == 0
    assert [result.status for result in Store(tmp_path / "store").results()] == ["done"] * 3


def test_a_folder_without_a_test_split_is_refused_before_the_first_run(tmp_path, capsys):
    photos = write_photos(tmp_path / "photos", ("train",))
    words = [TOY, "--smoke", "--data", photos, "--patches", "112", "--store", str(tmp_path / "store")]
    assert study(*words) == 2
    assert "test" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_a_results_folder_is_written_by_one_process_at_a_time(tmp_path):
    out, store, module = tmp_path / "out", Store(tmp_path / "store"), load(TOY)
    words = {"name": "toy-study", "out": out, "command": "nomax study toy"}
    writer = threading.Thread(target=publish, args=(module, SETUPS["default"], [], store), kwargs=words)
    with Store(tmp_path / "store").publishing():
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert not out.exists()
    writer.join(30)
    assert (out / "study.json").exists()


def test_results_are_exported_to_csv_and_no_longer_to_parquet(done, tmp_path, capsys):
    store = ["--store", str(done / "store")]
    assert study(str(tmp_path / "all.csv"), *store, command=Export) == 0
    assert study(*store, "--study", TOY, command=Export) == 0
    lines = (tmp_path / "all.csv").read_text()
    assert lines in capsys.readouterr().out
    records = list(csv.DictReader(io.StringIO(lines)))
    assert {record["phi"] for record in records} == {"softmax", "relu/L", "identity/L"}
    assert study(str(tmp_path / "all.parquet"), *store, command=Export) == 2
    assert "name that ends in .csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (["alhpa"], run_command, "did you mean"),
        (["nowhere.py"], run_command, "no such file"),
        ([TOY, "--setup", "hourly"], run_command, "did you mean hour"),
        ([TOY, "--shard", "5/4"], run_command, "--shard"),
        ([TOY, "--budget", "soon"], run_command, "--budget"),
        ([TOY, "--seeds", "0"], run_command, "--seeds"),
        ([TOY, "--seeds", "1", "1"], run_command, "different"),
        ([TOY, "--jobs", "0"], run_command, "--jobs"),
        ([TOY, "--data", "nowhere"], run_command, "neither a file"),
        ([TOY, "--model", "pico/5"], run_command, "multiple of the patch"),
        ([TOY, "--budget", "-5", "--dry-run"], run_command, "--budget"),
        ([TOY, "--smoke", "--setup", "nonsense"], run_command, "no set-up 'nonsense'"),
        ([TOY, "--probes", "nonsense", "--dry-run"], run_command, "--probes: 'nonsense'"),
        ([TOY, "--seeds"], run_command, "--seeds needs"),
        ([TOY, "--model"], run_command, "--model needs"),
        ([TOY, "--model", "S/abc"], run_command, "--model S/abc must"),
        ([TOY, "--patches", "7", "0"], run_command, "--patches 0 must be at least 1"),
        ([TOY, "--steps", "0"], run_command, "--steps 0 must be at least 1"),
        ([TOY, "--warmup", "0"], run_command, "--warmup 0 must be at least 1"),
        ([TOY, "--batch-size", "0"], run_command, "--batch-size 0 must be at least 1"),
        ([TOY, "--lr", "0"], run_command, "--lr 0 must be a positive number"),
        ([TOY, "--lr", "nan"], run_command, "--lr nan must be a positive number"),
        ([TOY, "--alphas", "1", "inf"], run_command, "--alphas 1 inf"),
        ([TOY, "--device", "nonsense", "--dry-run"], run_command, "--device nonsense"),
        ([TOY, "--device", "meta"], run_command, "--device meta"),
        ([TOY, "--submit", "a=b"], run_command, "--launcher submitit"),
        (["nowhere"], Merge, "is not a store"),
        (["--store", "nowhere"], Export, "is not a store"),
    ],
)
def test_wrong_options_are_explained_before_anything_runs(words, command, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert study(*words, command=command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("**/runs/*"))


def test_the_list_names_every_study_with_its_claims_runs_and_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert study("--setup", "smoke", "--store", str(tmp_path / "none"), command=List) == 0
    told = capsys.readouterr().out
    for name in STUDIES:
        module = load(name)
        line = next(line for line in told.splitlines() if line.split()[:1] == [name])
        assert module.TITLE in line
        assert all(claim in line for claim in module.CLAIMS)


@pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
def test_submitit_does_the_runs_as_jobs(small, tmp_path, capsys):
    words = [
        *small[:-4],
        "--seeds",
        "1",
        "--warmup",
        "1",
        "--store",
        str(tmp_path / "store"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert study(*words, "--launcher", "submitit", "--submit", "cluster=local", "timeout_min=1000", "--jobs", "2") == 0
    assert read(tmp_path / "out" / "study.json")["runs"] == {"done": 3, "diverged": 0, "failed": 0, "missing": 0}
