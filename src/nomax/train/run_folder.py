"""The run folder: config.json, run.json, metrics.jsonl, checkpoints/, and at the end result.json and model/."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

import nomax
from nomax import _files, models
from nomax.data import located
from nomax.data.source import listed
from nomax.train import checkpoints
from nomax.train import config as configs
from nomax.train.config import Config, LoopConfig

PLACES = ("data", "valid")  # the fields of configs that may be paths


class BusyError(RuntimeError):
    """Another process is training in this folder."""


def check(
    folder: Path,
    config: LoopConfig,
    text: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Raise a ValueError that lists the differences unless this config can start or resume in this folder.

    `text` has a SHA-256 of the text of each split, `classes` the class names of images. run.json records what a run
    began with; that of old runs does not.
    """
    path = folder / "config.json"
    if path.is_dir():
        raise ValueError(f"{path} is a folder; it must be the configuration of a run. Choose another --out.")
    if path.exists():
        new = replace(config, **_located(config))
        different = configs.differences(_spelled_as(configs.read(path, type(config)), new, folder), new)
        different += _other_classes(_record(folder).get("classes"), classes)
        began = _record(folder).get("text", {})
        different += [
            f"the text of {split}: SHA-256 {began[split][:12]}… there, {digest[:12]}… now"
            for split, digest in (text or {}).items()
            if began.get(split, digest) != digest
        ]
        if different:
            lines = "\n  ".join(different)
            raise ValueError(
                f"{folder} holds a run with another configuration:\n  {lines}\n"
                "Give the same options, with the same data, to go on with it, or another --out for a new run."
            )
    elif folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --out must be a folder.")
    elif folder.is_dir():
        # A run that was killed in its first moment may have left these.
        others = sorted(file.name for file in folder.iterdir() if file.name not in (".lock", "run.json"))
        if "checkpoints" in others or "metrics.jsonl" in others:
            raise ValueError(f"{path} is missing, of a run that began: restore it, or choose another --out.")
        if others and not others[0].endswith(".aside"):
            raise ValueError(f"{folder} holds something else than a run ({others[0]}); choose another --out.")


@contextmanager
def claimed(folder: Path, config: LoopConfig, command: str = "") -> Iterator[None]:
    """Hold a run folder, a new one or one with the same config; BusyError if another process holds it."""
    check(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise BusyError(f"another process is training in {folder}; wait for it, or choose another --out.") from None
    try:
        check(folder, config)
        for place in (folder, folder / "checkpoints", folder / "model"):
            _files.remove_leftovers(place)
        _write_down(folder, config, command)
        yield
    finally:
        lock.release()


def read(folder: Path, kind: type[Config]) -> Config:
    """Return the config of a run. Its data is where it was, or has moved together with the run folder."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no config.json (nomax train … --out).")
    config = configs.read(folder / "config.json", kind)
    places: dict[str, Any] = {
        name: next((known for known in _candidates(place, folder) if _is_there(known)), place)
        for name, place in _places(config).items()
    }
    return replace(config, **places)


def model(folder: Path, make: Callable[[], nn.Module]) -> Any:
    """Return the finished model of a run, or a new one with the weights of the newest checkpoint, in eval mode."""
    if (folder / "model" / "config.json").is_file():  # written after the weights
        return models.load(folder / "model")
    state = checkpoints.newest(folder / "checkpoints")
    if state is None:
        raise FileNotFoundError(f"{folder} holds neither a model nor a checkpoint yet.")
    made = make()
    models.hub.fill(made, state.get("average") or state["model"], str(state["path"]))
    return made.eval()


def note(folder: Path, **facts: Any) -> None:
    """Record the text or the classes that a run is trained with, for `check`, unless already recorded."""
    record = _record(folder)
    if not facts.keys() <= record.keys():
        _files.write_json(folder / "run.json", {**record, **facts})


def classes(folder: Path) -> tuple[str, ...] | None:
    """Return the class names of an image run; old runs do not record them."""
    names = _record(folder).get("classes")
    return None if names is None else tuple(names)


def result(folder: Path, measured: Collection[str] = ()) -> dict[str, Any] | None:
    """Return the result if the run is finished; raise a ValueError if it is damaged or lacks a measurement."""
    path = folder / "result.json"
    advice = "Remove it and give the same command again: it is made again from the newest checkpoint."
    try:
        content = _files.read_json(path, advice)
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("phi"), str):
        raise ValueError(f"{path} is damaged: it is not the result of a run. {advice}")
    for name in {"steps", "seconds", *measured, *content} - {"phi"}:
        if not _is_number(content.get(name)):
            raise ValueError(f"{path} is damaged: {name} is {str(content.get(name))[:40]!r}, not a number. {advice}")
    return content


def write_results(path: Path, content: Any) -> None:
    """Write result.json, or several results; an infinite perplexity is written as Python spells it."""
    _files.write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def facts(command: str) -> dict[str, Any]:
    """Return the command, versions, machine and time, for run.json."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": started, "command": command, "versions": versions(), "machine": machine()}


def versions() -> dict[str, str | None]:
    """Return the software versions, with the git revision in a checkout ("+" = with uncommitted changes)."""
    return {
        "nomax": nomax.__version__,
        "revision": _revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, Any]:
    """Return the processor and the system."""
    return {
        "cpu": _processor().get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
    }


def cpu_flags() -> list[str]:
    """Return the instruction-set extensions that the processor reports."""
    processor = _processor()
    return (processor.get("flags") or processor.get("Features") or "").split()


def _write_down(folder: Path, config: LoopConfig, command: str) -> None:
    path, run = folder / "config.json", folder / "run.json"
    if not path.exists():
        place = str(folder.absolute())  # to which the places of its data are relative, if they move together
        _files.write_json(run, {"seed": config.seed, "folder": place, **facts(command), "continued": []})
        _files.write(path, configs.to_json(replace(config, **_located(config))))
    elif result(folder) is None:
        record = _record(folder)
        record["continued"].append(facts(command))
        _files.write_json(run, record)


def _record(folder: Path) -> dict[str, Any]:
    """Return the contents of run.json."""
    path = folder / "run.json"
    advice = "It only tells how the run began: move it away, and the run goes on."
    try:
        record = _files.read_json(path, advice)
    except FileNotFoundError:
        return {"continued": []}
    if not _is_record(record):
        raise ValueError(f"{path} is damaged: it is not the record of a run. {advice}")
    return dict(record)


def _is_record(content: Any) -> bool:
    if not isinstance(content, dict) or not isinstance(content.get("continued"), list):
        return False
    text, classes = content.get("text", {}), content.get("classes", [])
    if not isinstance(text, dict) or not isinstance(classes, list):
        return False
    return all(isinstance(word, str) for word in (*text.values(), *classes))


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 2**63


def _places(config: LoopConfig) -> dict[str, Any]:
    return {name: place for name in PLACES if (place := getattr(config, name, ""))}


def _located(config: LoopConfig) -> dict[str, Any]:
    return {name: located(place) for name, place in _places(config).items()}


def _candidates(place: str, folder: Path) -> list[str]:
    """List where the data of a run may be: at its old path, or at its old position relative to the run folder."""
    there, then = located(place), _record(folder).get("folder")
    if not isinstance(then, str) or not os.path.isabs(place):
        return [there]
    moved = [os.path.normpath(folder.absolute() / os.path.relpath(path, then)) for path in _paths(place)]
    return [there, ",".join(moved)]


def _is_there(place: str) -> bool:
    """Return whether these are names, or paths that exist; for shards, "a-{000..123}.tar", their folder counts."""
    paths = _paths(place)
    return all(os.path.exists(os.path.dirname(path) if "{" in path else path) for path in paths if os.path.isabs(path))


def _paths(place: str) -> list[str]:
    """Split "FILE,FILE" if both are absolute paths, existing or not; return other paths and names as they are."""
    pairs = [(place[:comma], place[comma + 1 :]) for comma, letter in enumerate(place) if letter == ","]
    pair = next((pair for pair in pairs if all(map(os.path.isabs, pair))), None)
    return [place] if pair is None or os.path.exists(place) else list(pair)


def _spelled_as(old: Config, new: Config, folder: Path) -> Config:
    """Return the old config, with the new spelling of the data if both name the same location."""
    before, after = _places(old), _places(new)
    same = {
        name: place
        for name, place in after.items()
        if name in before and _real(place) in map(_real, _candidates(before[name], folder))
    }
    return replace(old, **same)


def _real(place: str) -> list[str]:
    return [os.path.realpath(path) if os.path.isabs(path) else path for path in _paths(place)]


def _other_classes(there: Sequence[str] | None, now: Sequence[str] | None) -> list[str]:
    if there is None or now is None or list(there) == list(now):
        return []
    before, after = set(there), set(now)
    gone, new = [name for name in there if name not in after], [name for name in now if name not in before]
    if not gone and not new:
        return ["the classes: in another order"]
    return [f"the classes: {listed(gone) or 'all of these'} there, {listed(new) or 'without them'} now"]


def _processor() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _revision() -> str | None:
    git = ["git", "-C", str(Path(nomax.__file__).parent)]
    try:
        # A revision of a repository around an installed copy would say nothing about nomax.
        _output([*git, "ls-files", "--error-unmatch", "__init__.py"])
        changes = _output([*git, "status", "--porcelain", "."])
        return _output([*git, "rev-parse", "HEAD"]).strip() + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _output(words: list[str]) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
