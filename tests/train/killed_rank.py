"""Under torchrun: `nomax` with the given arguments, but rank 1 is killed before step 4, the first time."""

import os
import signal
import sys

from nomax.cli import main
from nomax.train.vision.task import VisionTask

_batches = VisionTask.batches


def _dying(task, start, world):
    for step, batch in enumerate(_batches(task, start, world), start):
        if step == 4 and world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


if __name__ == "__main__":
    VisionTask.batches = _dying
    sys.exit(main())
