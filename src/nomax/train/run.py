"""The run folder: config.json, run.json, metrics.jsonl, checkpoints/, and at the end result.json and model/."""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nomax.data import located
from nomax.data.source import listed
from nomax.train import files, loop_config
from nomax.train.facts import facts
from nomax.train.loop_config import Config, LoopConfig

PLACES = ("data", "valid")  # the fields of configurations that may be paths


class BusyError(RuntimeError):
    """Another process is training in this folder."""


def check(
    folder: Path,
    config: LoopConfig,
    text: Mapping[str, str] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Raise a ValueError unless this configuration can start or go on in this folder; it lists what differs.

    `text` has a SHA-256 of the text of each split, `classes` the names of images' classes. What a run began with is in
    its run.json; old ones do not have it.
    """
    path = folder / "config.json"
    if path.is_dir():
        raise ValueError(f"{path} is a folder; it must be the configuration of a run. Choose another --out.")
    if path.exists():
        new = replace(config, **_located(config))
        different = loop_config.differences(_spelled_as(loop_config.read(path, type(config)), new, folder), new)
        different += _other_classes(_story(folder).get("classes"), classes)
        began = _story(folder).get("text", {})
        different += [
            f"the text of {split}: SHA-256 {began[split][:12]}… there, {found[:12]}… now"
            for split, found in (text or {}).items()
            if began.get(split, found) != found
        ]
        if different:
            listed = "\n  ".join(different)
            raise ValueError(
                f"{folder} holds a run with another configuration:\n  {listed}\n"
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
    """Hold a run folder, a new one or one with the same configuration; BusyError if another process holds it."""
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
            files.remove_leftovers(place)
        _write_down(folder, config, command)
        yield
    finally:
        lock.release()


def read(folder: Path, kind: type[Config]) -> Config:
    """The configuration of a run. Its data are where they were, or moved together with the run folder."""
    config = loop_config.read(folder / "config.json", kind)
    found: dict[str, Any] = {
        name: next((known for known in _candidates(place, folder) if _is_there(known)), place)
        for name, place in _places(config).items()
    }
    return replace(config, **found)


def note(folder: Path, **facts: Any) -> None:
    """Write down what a run is trained with, its text or its classes, for `check`, unless that is known."""
    story = _story(folder)
    if not facts.keys() <= story.keys():
        write_json(folder / "run.json", {**story, **facts})


def classes(folder: Path) -> tuple[str, ...] | None:
    """The names of the classes that a run of images learns; old ones do not say them."""
    found = _story(folder).get("classes")
    return None if found is None else tuple(found)


def result(folder: Path, measured: Collection[str] = ()) -> dict[str, Any] | None:
    """What came out, if the run is finished; a ValueError unless it is whole, with all that was measured."""
    path = folder / "result.json"
    advice = "Remove it and give the same command again: it is made again from the newest checkpoint."
    try:
        found = files.read_json(path, advice)
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("phi"), str):
        raise ValueError(f"{path} is damaged: it is not the result of a run. {advice}")
    for name in {"steps", "seconds", *measured, *found} - {"phi"}:
        if not _is_number(found.get(name)):
            raise ValueError(f"{path} is damaged: {name} is {str(found.get(name))[:40]!r}, not a number. {advice}")
    return found


def write_json(path: Path, content: Any) -> None:
    """Write JSON that is complete or not there."""
    files.write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _write_down(folder: Path, config: LoopConfig, command: str) -> None:
    path, story = folder / "config.json", folder / "run.json"
    if not path.exists():
        place = str(folder.absolute())  # to which the places of its data are relative, if they move together
        write_json(story, {"seed": config.seed, "folder": place, **facts(command), "continued": []})
        files.write(path, loop_config.to_json(replace(config, **_located(config))))
    elif result(folder) is None:
        told = _story(folder)
        told["continued"].append(facts(command))
        write_json(story, told)


def _story(folder: Path) -> dict[str, Any]:
    """What run.json holds."""
    path = folder / "run.json"
    advice = "It only tells how the run began: move it away, and the run goes on."
    try:
        found = files.read_json(path, advice)
    except FileNotFoundError:
        return {"continued": []}
    if not _is_story(found):
        raise ValueError(f"{path} is damaged: it is not the story of a run. {advice}")
    return dict(found)


def _is_story(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("continued"), list):
        return False
    text, classes = found.get("text", {}), found.get("classes", [])
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
    """Where the data of a run may be: where they were, or, seen from the run folder, where they were seen from it."""
    there, then = located(place), _story(folder).get("folder")
    if not isinstance(then, str) or not os.path.isabs(place):
        return [there]
    moved = [os.path.normpath(folder.absolute() / os.path.relpath(path, then)) for path in _files(place)]
    return [there, ",".join(moved)]


def _is_there(place: str) -> bool:
    """Whether these are names, or paths at which there is something; of shards, "a-{000..123}.tar", their folder."""
    paths = _files(place)
    return all(os.path.exists(os.path.dirname(path) if "{" in path else path) for path in paths if os.path.isabs(path))


def _files(place: str) -> list[str]:
    """An absolute path, or those of "FILE,FILE", be they there or not; or a name."""
    pairs = [(place[:comma], place[comma + 1 :]) for comma, letter in enumerate(place) if letter == ","]
    pair = next((pair for pair in pairs if all(map(os.path.isabs, pair))), None)
    return [place] if pair is None or os.path.exists(place) else list(pair)


def _spelled_as(old: Config, new: Config, folder: Path) -> Config:
    """A configuration in which data at the same place as another's have the other's spelling."""
    before, after = _places(old), _places(new)
    same = {
        name: place
        for name, place in after.items()
        if name in before and _real(place) in map(_real, _candidates(before[name], folder))
    }
    return replace(old, **same)


def _real(place: str) -> list[str]:
    return [os.path.realpath(path) if os.path.isabs(path) else path for path in _files(place)]


def _other_classes(there: Sequence[str] | None, now: Sequence[str] | None) -> list[str]:
    if there is None or now is None or list(there) == list(now):
        return []
    before, after = set(there), set(now)
    gone, new = [name for name in there if name not in after], [name for name in now if name not in before]
    if not gone and not new:
        return ["the classes: in another order"]
    return [f"the classes: {listed(gone) or 'all of these'} there, {listed(new) or 'without them'} now"]
