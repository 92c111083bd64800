"""Checkpoints survive what happens to disks and processes."""

import errno
import hashlib
import json
import os
import resource
import shutil
from dataclasses import replace

import pytest
import torch
from toy_task import CONFIG, HERE, Points, run

from nomax import _files
from nomax.train import checkpoints, run_folder, sharded
from nomax.train import config as configs


def state(step):
    weights = {"w": torch.full((1000,), float(step))}
    return {"step": step, "units": 0, "seconds": 0.0, "config": "", "model": weights, "optimiser": {}, "average": None}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    checkpoints.save(tmp_path, 7, state(7), keep=3)
    assert names(tmp_path) == ["step-00000007.pt", "step-00000007.pt.sha256"]
    loaded = checkpoints.newest(tmp_path)
    assert loaded["step"] == 7
    assert torch.equal(loaded["model"]["w"], state(7)["model"]["w"])


def test_the_hash_beside_it_is_what_sha256sum_expects(tmp_path):
    path = checkpoints.save(tmp_path, 7, state(7), keep=3)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (tmp_path / "step-00000007.pt.sha256").read_text() == f"{digest}  step-00000007.pt\n"


def test_only_the_newest_are_kept(tmp_path):
    for step in (5, 10, 99_999_999, 100_000_000):
        checkpoints.save(tmp_path, step, state(step), keep=2)
    assert [name for name in names(tmp_path) if name.endswith(".pt")] == ["step-100000000.pt", "step-99999999.pt"]
    assert checkpoints.newest(tmp_path)["step"] == 100_000_000


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "missing") is None


@pytest.mark.parametrize("damage", ["flipped", "cut", "no hash", "empty hash", "binary hash", "folder", "link"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(tmp_path, capsys, damage):
    for step in (5, 10):
        path = checkpoints.save(tmp_path, step, state(step), keep=3)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-100])
    elif damage == "no hash":
        path.with_name(path.name + ".sha256").unlink()
    elif damage == "binary hash":
        path.with_name(path.name + ".sha256").write_bytes(b"\xff\xfe\x00")
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "link":
        path.unlink()
        path.symlink_to(path)
    else:
        path.with_name(path.name + ".sha256").write_text("")
    assert checkpoints.newest(tmp_path)["step"] == 5
    told = capsys.readouterr().err
    assert str(path) in told
    assert "damaged" in told


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "no 'step'"),
        ([1, 2], "a list"),
        (None, "a NoneType"),
        ({**state(10), "step": 9}, "of step 9"),
        ({**state(10), "step": "10"}, "no 'step'"),
        ({**state(10), "model": [torch.ones(3)]}, "no 'model'"),
        ({**state(10), "model": {"w": 3.0}}, "no tensors"),
        ({**state(10), "average": {"w": 3.0}}, "no tensors"),
        ({name: value for name, value in state(10).items() if name != "optimiser"}, "no 'optimiser'"),
    ],
)
def test_what_is_no_checkpoint_is_damaged_though_its_hash_is_right(tmp_path, capsys, content, said):
    checkpoints.save(tmp_path, 5, state(5), keep=3)
    path = checkpoints.save(tmp_path, 10, state(10), keep=3)
    torch.save(content, path)
    path.with_name(path.name + ".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    assert checkpoints.newest(tmp_path)["step"] == 5
    told = capsys.readouterr().err
    assert f"the checkpoint {path} is damaged" in told
    assert said in told
    checkpoints.tidy(tmp_path, 5)
    assert f"{path.name}.damaged" in names(tmp_path)


def save_sharded(folder, step):
    """A sharded checkpoint, as a single rank writes it."""
    facts = {name: value for name, value in state(step).items() if name in ("step", "units", "seconds", "config")}
    path = folder / checkpoints.name(step, sharded=True)
    moments = {f"optimiser/{kind}/w": torch.full((1000,), float(step)) for kind in ("exp_avg", "exp_avg_sq")}
    sharded.save(path, facts, {"model/w": state(step)["model"]["w"], **moments}, HERE)
    return path


def test_a_sharded_checkpoint_comes_back_as_it_was_saved(tmp_path):
    path = save_sharded(tmp_path, 7)
    assert names(tmp_path) == ["step-00000007"]
    assert names(path) == ["shard-00001-model-00001-of-00001.safetensors", "state.json"]
    loaded = checkpoints.newest(tmp_path)
    assert loaded["step"] == 7
    assert loaded["average"] is None
    assert torch.equal(loaded["model"]["w"], state(7)["model"]["w"])
    assert torch.equal(loaded["optimiser"]["state"]["w"]["exp_avg"], torch.full((1000,), 7.0))


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "another", "no state", "state", "empty", "step"])
def test_a_damaged_sharded_checkpoint_is_named_and_the_one_before_it_serves(tmp_path, capsys, damage):
    checkpoints.save(tmp_path, 5, state(5), keep=3)
    path = save_sharded(tmp_path, 10)
    (shard,) = path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        shard.write_bytes(data[:-100])
    elif damage == "missing":
        shard.unlink()
    elif damage == "another":
        shard.with_name("shard-00002-model-00001-of-00001.safetensors").write_bytes(data)
    elif damage == "no state":
        (path / "state.json").unlink()
    elif damage == "state":
        (path / "state.json").write_text("[1, 2]")
    elif damage == "empty":
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.rename(path.with_name("step-00000011"))
    assert checkpoints.newest(tmp_path)["step"] == 5
    assert "damaged" in capsys.readouterr().err
    checkpoints.tidy(tmp_path, 5)
    assert [name for name in names(tmp_path) if name.endswith(".damaged")]


def test_a_sharded_checkpoint_of_another_optimiser_is_named(tmp_path):
    run(tmp_path, config=replace(CONFIG, steps=5))
    weights = {
        f"model/{name}": tensor for name, tensor in checkpoints.newest(tmp_path / "checkpoints")["model"].items()
    }
    facts = {"step": 7, "units": 0, "seconds": 0.0, "config": configs.digest(tmp_path, CONFIG)}
    path = tmp_path / "checkpoints" / "step-00000007"
    sharded.save(path, facts, weights, HERE)
    with pytest.raises(ValueError, match=rf"{path} has no state of this optimiser"):
        run(tmp_path)
    sharded.save(path.with_name("step-00000008"), {**facts, "step": 8}, dict(list(weights.items())[1:]), HERE)
    with pytest.raises(ValueError, match=r"step-00000008 has other weights \(model\)"):
        run(tmp_path)


def test_only_the_newest_are_kept_of_both_kinds(tmp_path):
    checkpoints.save(tmp_path, 5, state(5), keep=2)
    for step in (10, 15):
        save_sharded(tmp_path, step)
    checkpoints.save(tmp_path, 20, state(20), keep=2)
    assert names(tmp_path) == ["step-00000015", "step-00000020.pt", "step-00000020.pt.sha256"]


def test_a_kill_while_shards_are_written_leaves_the_checkpoint_before_and_nothing_with_a_name(tmp_path, monkeypatch):
    save_sharded(tmp_path, 5)

    def killed(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(sharded._files, "write_json", killed)
        with pytest.raises(SystemExit):
            save_sharded(tmp_path, 10)
    assert [name for name in names(tmp_path) if not name.endswith(".aside")] == ["step-00000005"]
    assert checkpoints.newest(tmp_path)["step"] == 5
    _files.remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000005"]


def test_shards_that_cannot_be_written_leave_nothing_behind(tmp_path, monkeypatch):
    save_sharded(tmp_path, 5)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sharded._files, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        save_sharded(tmp_path, 10)
    assert names(tmp_path) == ["step-00000005"]


def test_damaged_checkpoints_are_all_kept_aside(tmp_path, capsys):
    for _ in range(3):
        checkpoints.save(tmp_path, 5, state(5), keep=3)
        checkpoints.save(tmp_path, 10, state(10), keep=3).write_bytes(b"")
        checkpoints.tidy(tmp_path, checkpoints.newest(tmp_path)["step"])
    kept = [name for name in names(tmp_path) if name.startswith("step-00000010.pt.damaged")]
    assert len(kept) == 3


def test_weights_of_another_model_are_refused_though_the_configuration_is_the_same(tmp_path):
    with run_folder.claimed(tmp_path, CONFIG):
        run(tmp_path)
    task = Points()
    task.model.head = torch.nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"step-00000012\.pt has other weights .* Move it away"):
        run(tmp_path, task)


def test_if_every_checkpoint_is_damaged_the_error_says_what_to_do(tmp_path, capsys):
    for step in (5, 10):
        checkpoints.save(tmp_path, step, state(step), keep=3).write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole\. Remove"):
        checkpoints.newest(tmp_path)
    assert capsys.readouterr().err.count("damaged") == 2


def test_a_damaged_checkpoint_does_not_push_out_good_ones(tmp_path, capsys):
    for step in (5, 10):
        path = checkpoints.save(tmp_path, step, state(step), keep=3)
    path.write_bytes(b"")
    checkpoints.tidy(tmp_path, checkpoints.newest(tmp_path)["step"])
    checkpoints.save(tmp_path, 8, state(8), keep=1)
    assert checkpoints.newest(tmp_path)["step"] == 8
    damaged = ["step-00000010.pt.damaged", "step-00000010.pt.sha256.damaged"]
    assert names(tmp_path) == ["step-00000008.pt", "step-00000008.pt.sha256", *damaged]


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    checkpoints.save(tmp_path, 5, state(5), keep=3)
    checkpoints.save(tmp_path, 6, {"step": Evil()}, keep=3)
    assert checkpoints.newest(tmp_path)["step"] == 5
    captured = capsys.readouterr()
    assert "ran" not in captured.out
    assert "cannot be read" in captured.err


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path):
    checkpoints.save(tmp_path, 5, state(5), keep=1)
    before = names(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # every write beyond fails, as on a full disk
    try:
        with pytest.raises(OSError, match=r"step-00000010\.pt could not be written: .*make room"):
            checkpoints.save(tmp_path, 10, state(10), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == before
    assert checkpoints.newest(tmp_path)["step"] == 5


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_an_error_at_the_last_moment_loses_nothing_either(tmp_path, monkeypatch, where):
    checkpoints.save(tmp_path, 5, state(5), keep=1)
    before = names(tmp_path)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"nomax._files.os.{where}", fail)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints.save(tmp_path, 10, state(10), keep=1)
    monkeypatch.undo()
    assert names(tmp_path) == before
    assert checkpoints.newest(tmp_path)["step"] == 5


def test_two_may_write_one_file_at_the_same_time_and_the_last_one_wins(tmp_path):
    path = tmp_path / "page.html"
    with _files.atomic(path) as first:
        first.write(b"first")
        _files.write(path, "second")
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["page.html"]


def test_a_run_whose_newest_checkpoint_is_damaged_still_ends_the_same(tmp_path, capsys):
    run(tmp_path / "whole")
    short = replace(CONFIG, steps=12)
    run(tmp_path / "hurt", Points(short), short)
    newest = tmp_path / "hurt" / "checkpoints" / "step-00000012.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    run(tmp_path / "hurt")
    states = [checkpoints.newest(tmp_path / name / "checkpoints")["model"] for name in ("hurt", "whole")]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert "step-00000012.pt is damaged" in capsys.readouterr().err


def test_another_configuration_is_refused_with_the_fields_that_differ(tmp_path):
    with run_folder.claimed(tmp_path, CONFIG):
        pass
    with pytest.raises(ValueError, match="another configuration") as caught:
        run_folder.check(tmp_path, replace(CONFIG, lr=0.1, seed=3))
    assert "lr: 0.05 there, 0.1 now" in str(caught.value)
    assert "seed: 0 there, 3 now" in str(caught.value)
    assert "steps" not in str(caught.value)


def test_how_the_work_is_done_may_change(tmp_path):
    with run_folder.claimed(tmp_path, CONFIG):
        pass
    run_folder.check(tmp_path, replace(CONFIG, threads=2, accumulate=4, checkpoint_every=100, distribute="fsdp"))


def test_a_folder_serves_one_process_at_a_time(tmp_path):
    second = run_folder.claimed(tmp_path, CONFIG)
    with run_folder.claimed(tmp_path, CONFIG), pytest.raises(run_folder.BusyError, match="another process is training"):
        second.__enter__()


def test_a_folder_with_other_things_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"something else than a run \(thesis.tex\)"):
        run_folder.check(tmp_path, CONFIG)


def test_a_misspelt_field_in_the_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text(configs.to_json(CONFIG).replace('"lr"', '"learning_rate"'))
    with pytest.raises(ValueError, match="learning_rate: Unexpected keyword argument"):
        run_folder.check(tmp_path, CONFIG)


def test_checkpoints_of_another_run_are_refused(tmp_path):
    with run_folder.claimed(tmp_path, CONFIG):
        run(tmp_path)
    other = replace(CONFIG, lr=0.1)
    (tmp_path / "config.json").write_text(configs.to_json(other))
    with pytest.raises(ValueError, match="another configuration"):
        run(tmp_path, Points(other), other)


def test_a_field_that_a_later_version_adds_does_not_end_a_run(tmp_path):
    with run_folder.claimed(tmp_path, CONFIG):
        run(tmp_path, Points(CONFIG), CONFIG)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["ema"]  # as if it had been written before there was one
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert configs.read(tmp_path / "config.json", configs.LoopConfig) == CONFIG
    assert configs.digest(tmp_path, CONFIG) == configs.digest(tmp_path, replace(CONFIG, ema=0.5))
