"""How long runs will take: as long as finished ones took for the same number of operations."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable

from nomax.study.row import Row
from nomax.study.run import Run

# Of one core with AVX2 on small matrices, in training steps. It serves until the first run is finished.
FLOP_PER_SECOND = 25e9
START = 2.0  # seconds to start a process and to load the data

NUMBER = r"\d+(?:\.\d+)?"
PIECE = rf"\s*({NUMBER})\s*(min|[smhd])"  # of a time, such as 30m
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class Estimate:
    """Seconds per floating point operation, of each kind of model where known, else of any, else an assumption."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rates: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            self.learn(row)

    def learn(self, row: Row) -> None:
        """Take a finished run into account."""
        if row.status == "done" and row.seconds > 0 and row.train_flops > 0:
            self._rates[row.variant].append(row.seconds / row.train_flops)

    def seconds(self, run: Run, share: float = 1.0) -> float:
        """How long a run will take, or the share of it that is left."""
        rates = self._rates.get(run.facts["variant"]) or [rate for some in self._rates.values() for rate in some]
        rate = statistics.median(rates) if rates else 1 / FLOP_PER_SECOND
        return START + share * rate * run.train_flops

    @property
    def source(self) -> str:
        """Where the numbers come from, in words."""
        number = sum(map(len, self._rates.values()))
        if number:
            return f"estimated from {number} finished run{'s' * (number > 1)}"
        return f"estimated at {FLOP_PER_SECOND / 1e9:.0f} GFLOP/s for a core, until a run is finished"


def parse_seconds(text: str) -> float:
    """ "2h", "90m", "1h30m", "45s" or a plain number of seconds."""
    plain = text.strip().lower()
    if re.fullmatch(NUMBER, plain):
        plain += "s"
    total = sum(float(number) * UNITS[unit] for number, unit in re.findall(PIECE, plain))
    if total <= 0 or not re.fullmatch(f"({PIECE})+", plain):
        raise ValueError(f"--budget {text!r} must be a time such as 2h, 90m, 1h30m or 45s.")
    return total


def spelled(seconds: float) -> str:
    """A time as people say it: 45 s, 12 min, 1 h 30 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"
