"""metrics.jsonl, the record of a run: one line of JSON per step and per evaluation. TensorBoard gets a copy."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

FILE = "metrics.jsonl"


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run so far, except one that is just being written."""
    return [line for line, _ in _lines(_content(folder / FILE))]


def last(folder: Path) -> dict[str, Any]:
    """Return the newest step of a run in progress, without reading the whole file; {} if there is none yet."""
    try:
        with (folder / FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            tail = file.read().split(b"\n")
    except OSError:  # nothing yet, or nothing that can be read: the run itself will say so
        return {}
    # The first may be cut off, the last is empty or not whole yet.
    lines = [line for raw in tail[:-1] for line, _ in _lines(raw + b"\n") if "loss" in line]
    return lines[-1] if lines else {}


class Metrics:
    """Write the metrics of a run that resumes from a step: lines of later steps are removed, so none appears twice.

    A line is written every `log_every` steps. A file that lacks lines up to this step, which were on disk before the
    checkpoint was, is damaged: that is a ValueError, and the file stays as it is. Without a file, or with an empty one,
    there is nothing more to lose: the run continues, with a note on stderr.
    """

    def __init__(
        self, folder: Path, step: int, tensorboard: bool = False, evaluated: str = "test", log_every: int = 1
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        self.evaluations: dict[int, dict[str, float]] = {}
        self._evaluated = evaluated
        kept, last, number = 0, 0, 0
        content = _content(path)
        for line, end in _lines(content):
            if line["step"] > step:
                break
            if "evaluation" in line:
                self.evaluations[line["step"]] = line["evaluation"]
            kept, last, number = end, line["step"], number + 1
        if last < step - step % log_every:
            if content:
                raise ValueError(
                    f"{path} is damaged: line {number + 1} is not whole or missing, but the checkpoint is of step "
                    f"{step}. Mend it, or move it away: the run then goes on without the lines before."
                )
            print(f"nomax: {path} has no lines up to step {step}; the run goes on without them.", file=sys.stderr)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(kept)
        self._board = _board(folder / "tensorboard", step) if tensorboard else None

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line in one piece, so that a reader can follow the file while the run goes on."""
        self._file.write(json.dumps(line).encode() + b"\n")
        if "evaluation" in line:
            self.evaluations[line["step"]] = dict(line["evaluation"])
        if self._board is not None:
            values = {f"{self._evaluated}/{name}": value for name, value in line.get("evaluation", {}).items()}
            values |= {f"train/{name}": line[name] for name in line if name not in ("step", "evaluation")}
            for name, value in values.items():
                self._board.add_scalar(name, value, line["step"])

    def sync(self) -> None:
        """Wait until all lines are on the disk: a checkpoint must not be newer than its metrics."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each line and where it ends, up to the first incomplete one: a kill may have cut it."""
    end = 0
    for raw in data.splitlines(keepends=True):
        end += len(raw)
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            return
        if not raw.endswith(b"\n") or not _is_line(line):
            return
        yield line, end


def _is_line(line: Any) -> bool:
    """Return whether `Metrics.write` wrote this: a step and numbers, or a step and an evaluation that has numbers."""
    if not isinstance(line, dict) or type(line.get("step")) is not int or line["step"] < 0:
        return False
    measured = line.get("evaluation", line)
    if not isinstance(measured, dict) or "loss" not in measured:
        return False
    return all(type(value) is float or (type(value) is int and abs(value) < 2**63) for value in measured.values())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. Move it away, and the run goes on.") from error


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _say_that_tensorboard_is_missing()
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


@cache  # once for all φ of a command
def _say_that_tensorboard_is_missing() -> None:
    print(f"nomax: TensorBoard is not installed, so the metrics are in {FILE} only.", file=sys.stderr)
