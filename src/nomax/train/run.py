"""The run folder: config.json, run.json, metrics.jsonl, checkpoints/, and at the end result.json and model/."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nomax.train import files, loop_config
from nomax.train.facts import facts
from nomax.train.loop_config import LoopConfig


class BusyError(RuntimeError):
    """Another process is training in this folder."""


def check(folder: Path, config: LoopConfig, text: Mapping[str, str] | None = None) -> None:
    """Raise a ValueError unless this configuration can start or go on in this folder; it lists what differs.

    `text` has a SHA-256 of the text of each split. What a run began with is in its run.json; old ones do not have it.
    """
    path = folder / "config.json"
    if path.is_dir():
        raise ValueError(f"{path} is a folder; it must be the configuration of a run. Choose another --out.")
    if path.exists():
        different = loop_config.differences(loop_config.read(path, type(config)), config)
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


def note_text(folder: Path, text: Mapping[str, str]) -> None:
    """Write down which text a run is trained with, for `check`, unless that is known."""
    story = _story(folder)
    if "text" not in story:
        write_json(folder / "run.json", {**story, "text": dict(text)})


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
        write_json(story, {"seed": config.seed, **facts(command), "continued": []})
        files.write(path, loop_config.to_json(config))
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
    text = found.get("text", {}) if isinstance(found, dict) else None
    whole = isinstance(text, dict) and all(isinstance(digest, str) for digest in text.values())
    if not whole or not isinstance(found.get("continued"), list):
        raise ValueError(f"{path} is damaged: it is not the story of a run. {advice}")
    return dict(found)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 2**63
