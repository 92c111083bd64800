# alias until the importers have moved: nomax.train.one.load_and_train -> nomax.train.jobs.train(Job(…), …)
from pathlib import Path
from typing import Any

from nomax.console import Console
from nomax.train.console import Stop
from nomax.train.distributed import World
from nomax.train.jobs import Job, train


def load_and_train(
    config: Any, folder: Path, command: str, world: World, stop: Stop, console: Console, tensorboard: bool
) -> int:
    return train(Job(config, folder, command, tensorboard), world, stop, console)
