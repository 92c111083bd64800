"""Worker processes: they end with their batches, leave signals to their parent, and say nothing when it hangs up."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pictures import broken_folder, fill

from nomax.data.images.batches import batches, evaluation_batches
from nomax.data.images.files import FolderSource
from nomax.data.images.transforms import Augment
from nomax.data.order import Order
from nomax.data.source import DataError

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create"
)  # more workers than this machine has cores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("images"), {"a": 4, "b": 3, "c": 4})


def children() -> set[int]:
    processes = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == os.getpid():
                processes.add(int(entry.name))
    return processes


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("end", ["close", "forget", "error", "use up"])
def test_the_workers_end_with_the_batches(end: str, tmp_path: Path) -> None:
    source = FolderSource(broken_folder(tmp_path), on_error="raise" if end == "error" else "skip")
    before = children()
    if end == "use up":
        list(evaluation_batches(source, 8, 2, workers=2))
    else:
        made = batches(source, Order(7, 1, shuffle=False), Augment(8), workers=2)
        next(made)
        assert len(children() - before) == 2
        if end == "close":
            made.close()
            made.close()
        elif end == "forget":
            del made
        else:
            with pytest.raises(DataError):
                list(made)
    while children() - before:  # for ever, if they do not end
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_leave_signals_to_their_parent(folder: Path) -> None:
    """A cluster sends SIGTERM to every process; the parent still needs batches until it has saved its work."""
    source = FolderSource(folder)
    before = children()
    with batches(source, Order(11, 4), Augment(8), workers=2) as made:
        next(made)
        started = children() - before
        while not all(_blocks(worker, signal.SIGTERM) for worker in started):
            time.sleep(0.01)  # the first batch may be there before the second worker is
        workers = " ".join(map(str, started))
        subprocess.run(["sh", "-c", f"kill -TERM {workers}; kill -INT {workers}"], check=True)
        assert [batch.step for batch in itertools.islice(made, 12)] == list(range(1, 13))


def _blocks(process: int, number: int) -> bool:
    (mask,) = re.findall(r"^SigBlk:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), flags=re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


SERVER = """
import socket
from multiprocessing import resource_sharer
from nomax.data.images.workers import _in_worker

_in_worker(0)
address, _ = resource_sharer._resource_sharer.register(lambda *_: None, lambda: None)
with socket.socket(socket.AF_UNIX) as caller:
    caller.connect(address)
resource_sharer.stop()  # which waits until the thread has seen that the caller hung up
"""


def test_a_worker_says_nothing_when_its_parent_hangs_up_in_the_middle_of_a_batch() -> None:
    done = subprocess.run([sys.executable, "-c", SERVER], check=True, capture_output=True, text=True)
    assert not done.stderr


PROGRAM = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes away from what runs in its background

from nomax.data.images.batches import batches
from nomax.data.images.files import FolderSource
from nomax.data.order import Order
from nomax.data.images.transforms import Augment

source = FolderSource(sys.argv[1])
made = batches(source, Order(len(source), 4), Augment(8), workers=2)
for batch in made:
    print(batch.step, flush=True)
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)"])
def test_ctrl_c_or_the_end_of_the_program_ends_its_workers(ending: str, folder: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", f"{PROGRAM}    if batch.step == 19: {ending or 'pass'}", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    for _ in range(20):
        program.stdout.readline()
    if not ending:
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does, to all of them
    try:
        _, errors = program.communicate()
    finally:
        program.kill()
    if ending:
        assert program.returncode == 3
        assert not errors
    else:
        assert errors.strip().endswith("KeyboardInterrupt")
        assert errors.count("Traceback") == 1, "a worker complained too"
    with pytest.raises(ProcessLookupError):
        os.killpg(program.pid, 0)  # nobody of the group is left
