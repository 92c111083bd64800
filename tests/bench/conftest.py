import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nomax.bench import harness


@pytest.fixture
def measured(tmp_path: Path) -> Callable[[str], Any]:
    """Read the raw results that a bench wrote into `tmp_path`."""
    return lambda name: json.loads((tmp_path / f"{name}.json").read_text())


@pytest.fixture
def stop_at_race(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Press Ctrl-C when so many races are over."""
    race, calls = harness.race, itertools.count()

    def stop(number: int) -> None:
        def interrupted(*arguments: Any) -> Any:
            if next(calls) == number:
                raise KeyboardInterrupt
            return race(*arguments)

        monkeypatch.setattr(harness, "race", interrupted)

    return stop
