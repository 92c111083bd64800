"""The run folder: config.json, run.json, metrics.jsonl, checkpoints/, and at the end result.json and model/."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nomax.train import files, loop_config
from nomax.train.facts import facts
from nomax.train.loop_config import LoopConfig


class BusyError(RuntimeError):
    """Another process is training in this folder."""


def check(folder: Path, config: LoopConfig) -> None:
    """Raise a ValueError unless this configuration can start or go on in this folder; it lists what differs."""
    path = folder / "config.json"
    if path.is_file():
        different = loop_config.differences(loop_config.read(path, type(config)), config)
        if different:
            listed = "\n  ".join(different)
            raise ValueError(
                f"{folder} holds a run with another configuration:\n  {listed}\n"
                "Give the same options to go on with it, or another --out for a new run."
            )
    elif folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --out must be a folder.")
    elif folder.is_dir():
        # A run that was killed in its first moment may have left these.
        others = sorted(file.name for file in folder.iterdir() if file.name not in (".lock", "run.json"))
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
        _write_down(folder, config, command)
        yield
    finally:
        lock.release()


def result(folder: Path) -> dict[str, Any] | None:
    """What came out, if the run is finished."""
    try:
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found
    except FileNotFoundError:
        return None


def write_json(path: Path, content: Any) -> None:
    """Write JSON that is complete or not there."""
    files.write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _write_down(folder: Path, config: LoopConfig, command: str) -> None:
    path, story = folder / "config.json", folder / "run.json"
    if not path.exists():
        write_json(story, {"seed": config.seed, **facts(command), "continued": []})
        files.write(path, loop_config.to_json(config))
    elif result(folder) is None:
        told = json.loads(story.read_text()) if story.exists() else {"continued": []}
        told["continued"].append(facts(command))
        write_json(story, told)
