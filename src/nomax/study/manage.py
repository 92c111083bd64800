"""Everything about studies except running them: `nomax study list`, `draw`, `merge`, `export`, --plan and --dry-run."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from rich.box import SIMPLE_HEAD

from nomax import _files
from nomax.console import Console, Table
from nomax.study import STUDIES, Study, load, named_setup, short
from nomax.study.engine.experiment import Experiment, TrainedExperiment
from nomax.study.engine.publication import Publication, results_folders
from nomax.study.engine.publish import redraw, to_csv
from nomax.study.engine.result import ImageResult, Result, finals
from nomax.study.engine.runner import Estimate, share_left, spell_time, unfinished, unique
from nomax.study.engine.statistics import accuracy, student
from nomax.study.engine.store import Store, merge
from nomax.study.engine.verdict import amount

STORE = Path("runs/study")
NOTHING = "–"
Place = tuple[str, int]  # a model and its length


@dataclass(frozen=True)
class List:
    """List the studies: the question of each, the claims it judges, how many runs it has, and how long they will take.

    Times are for one core, and cover only runs that are not in the store yet. `nomax study NAME --dry-run` lists all
    runs.
    """

    setup: str = "default"
    """Size of the studies: default, hour, day or smoke."""
    store: Path = STORE
    """Folder of all runs; finished ones are used to estimate the time of others."""

    def run(self) -> int:
        """Print the table."""
        return _attempt("list", self._list)

    def _list(self) -> str:
        store = Store(self.store, create=False)
        estimate = Estimate(store.results())
        table = Table(box=SIMPLE_HEAD)
        for column in ("study", "asks", "claims", "runs", "to do", "core time"):
            table.add_column(column, justify="right" if column in ("runs", "to do", "core time") else "left")
        for name in STUDIES:
            study = load(name)
            setup = named_setup(study, self.setup)
            runs = unique(study.grid(setup, setup.seeds))
            Publication.read(Path("results", name)).lend(store, runs)
            left = unfinished(runs, store)
            seconds = sum(estimate.seconds(run) for run in left)
            claims = " ".join(study.CLAIMS)
            table.add_row(name, study.TITLE, claims, str(len(runs)), str(len(left)), spell_time(seconds))
        Console().print(table)
        return f"Set-up {self.setup}; {estimate.source}. To run one: nomax study NAME --setup {self.setup}"


@dataclass(frozen=True)
class Draw:
    """Redraw the figures of results folders from the runs and verdicts in them, without a store.

    Everything else in the folders stays as it is, including attention maps, which need the models. For example:
    nomax study draw results/alpha results/scaling
    """

    results: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="[RESULTS ...]", help_behavior_hint="(default: results)")]
    ] = (Path("results"),)
    """Folders that `nomax study` wrote (each with a study.json), or folders that contain such folders."""

    def run(self) -> int:
        """Draw the figures; return 0, or 2 if something cannot be drawn."""
        return _attempt("draw", self._draw)

    def _draw(self) -> str:
        return "\n".join(f"Written: {', '.join(map(str, redraw(each)))}" for each in results_folders(self.results))


@dataclass(frozen=True)
class Merge:
    """Copy the finished runs of other stores into one, such as those that array jobs filled with --shard.

    A run that is in both is left as it is; two different outcomes of one run are an error that names both. Afterwards
    `nomax study NAME` finds the runs done, and draws the figures. Exit codes: 0 success, 2 nothing was copied, for the
    reason printed.
    """

    folders: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER [FOLDER ...]", help_behavior_hint="(at least one)")]
    ]
    """Stores to copy from: folders given to `nomax study --store`."""
    store: Path = STORE
    """Store to copy the runs into."""

    def run(self) -> int:
        """Merge the stores; return 0, or 2 if they cannot be merged, and then nothing has been copied."""
        return _attempt("merge", self._merge)

    def _merge(self) -> str:
        if not self.folders:
            raise ValueError("name at least one store, the folder of `nomax study --store`.")
        for folder in self.folders:
            _check_store(folder)
            if folder.resolve() == self.store.resolve():
                raise ValueError(f"{folder} is the store itself; name others, or another --store.")
        store = Store(self.store)
        copied = merge(store, [Store(folder) for folder in self.folders])
        return f"{len(copied)} runs are new in {self.store}, which now has {len(store.finished())}."


@dataclass(frozen=True)
class Export:
    """Write the results in a store as CSV, one line per run.

    Without a file, print them to the terminal.
    """

    file: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="[FILE]")]] = None
    """File to write, ending in .csv."""
    study: str | None = None
    """Export only the runs of this study."""
    store: Path = STORE
    """Store to read: the folder given to `nomax study --store`."""

    def run(self) -> int:
        """Write the results; return 0, or 2 if there is nothing to write or nowhere to write it."""
        return _attempt("export", self._export)

    def _export(self) -> str:
        _check_store(self.store)
        results = Store(self.store).results(study=None if self.study is None else short(self.study))
        if not results:
            whose = "" if self.study is None else f" of the study {self.study}"
            raise ValueError(f"{self.store} has no finished run{whose}.")
        if self.file is None:
            print(to_csv(results), end="")
            return ""
        if self.file.suffix == ".parquet":
            raise ValueError(f"{self.file}: Parquet is no longer written. Give a name that ends in .csv.")
        if self.file.suffix != ".csv":
            raise ValueError(f"{self.file} must end in .csv.")
        _files.write(self.file, to_csv(results))
        return f"{len(results)} runs: {self.file}"


def _attempt(command: str, action: Callable[[], str]) -> int:
    """Run a command and print its message; return 0, or 2 after an error that the user can fix."""
    try:
        message = action()
    except (ValueError, OSError, ImportError) as error:
        print(f"nomax study {command}: {error}", file=sys.stderr)
        return 2
    if message:
        Console().print(message, soft_wrap=True)
    return 0


def _check_store(folder: Path) -> None:
    if not (folder / "runs").is_dir():
        raise FileNotFoundError(f"{folder} is not a store: it has no folder runs. Give that of `nomax study --store`.")


class Cost(NamedTuple):
    """The cost of some runs."""

    runs: int = 0
    hours: float = 0.0
    left: int = 0
    hours_left: float = 0.0
    trained: int = 0
    """Trainings among them."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the table."""
        return str(self.runs), f"{self.hours:.2f}", str(self.left), f"{self.hours_left:.2f}"


def print_plan(
    module: Study,
    setup: Any,
    runs: Sequence[Experiment],
    store: Store,
    sources: Mapping[str, Sequence[Result]],
    elsewhere: Sequence[Result],
    console: Console,
) -> None:
    """Print hours and noise by model, and what the planned seeds can decide about each claim.

    sources: finished runs by origin, the best source first; the noise is taken from the first source whose runs repeat
    a setting, and the times from all of them, the store and other studies. Raises a ValueError if no setting was
    repeated.
    """
    finished = [*store.results(), *(result for results in (*sources.values(), elsewhere) for result in results)]
    estimate = Estimate({result.key: result for result in finished}.values())
    number = len(setup.seeds)
    origin, results = next(((name, some) for name, some in sources.items() if noise(some)), ("", []))
    known, costs = noise(results), _costs(runs, store, estimate)
    unit = "points" if any(isinstance(result, ImageResult) for result in results) else "nats"
    typical = math.sqrt(fmean(deviation**2 for deviation in known.values())) if known else math.nan
    table = Table(box=SIMPLE_HEAD)
    for column in ("model", "L", "runs", "core-hours", "to do", "core-hours", "noise of a seed", f"±, {number} seeds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for place, cost in costs.items():
        deviation = known.get(place, typical) if cost.trained else math.nan
        # A difference of two runs has the noise of both.
        width = student(number - 1) * deviation * math.sqrt(2 / number) if number > 1 else math.nan
        noises = [amount(value, unit) if value == value else NOTHING for value in (deviation, width)]
        table.add_row(place[0], str(place[1]), *cost.cells, *noises)
    console.print(table)
    whole = _total(costs.values())
    console.print(
        f"{len(runs)} runs, {whole.hours:.1f} core-hours in all; {whole.left} to do, {whole.hours_left:.1f} core-hours "
        f"({estimate.source})."
    )
    if not known:
        raise ValueError(
            "nothing is known of the noise yet: no setting has been run with two seeds. A pilot tells it: the same "
            "command with --seeds 2 instead of --plan, or with fewer settings."
        )
    console.print(
        f"The noise is the standard deviation between seeds of {origin}; ± is how far the 95 % interval of one "
        "difference reaches, at one model and length."
    )
    _print_claims(module, setup, results, whole.hours / number, console)


def _print_claims(module: Study, setup: Any, results: Sequence[Result], hours: float, console: Console) -> None:
    """Print each claim's margin beside the interval that the planned seeds give; `hours` is the cost of a seed."""
    number = len(setup.seeds)
    table = Table(box=SIMPLE_HEAD, title="What the planned seeds can tell")
    for column in ("claim", "compared", f"±, {number} seeds", "margin", "seeds for it", "core-hours"):
        table.add_column(column, justify="left" if column in ("claim", "compared") else "right", max_width=60)
    for verdict in module.verdicts(results, setup):
        for name, each in verdict.comparisons.items():
            here = number if each.over == "seeds" else each.seeds
            width, wanted = each.half_width(here), each.seeds_for(each.margin)
            widths = [amount(value, each.unit) for value in (width, each.margin)]
            count, cost = str(wanted or "over 1,000"), "" if wanted is None else f"{hours * wanted:.1f}"
            needed = [count, cost] if each.over == "seeds" else [f"{count} settings", ""]
            table.add_row(verdict.claim, name, *widths, *needed)
    if table.row_count:
        console.print(table)


def noise(results: Sequence[Result]) -> dict[Place, float]:
    """Return the standard deviation of scores between seeds, by model and length, over all repeated settings."""
    cells: dict[tuple[Place, str], list[float]] = {}
    for result in finals(results):
        score = accuracy(result) if isinstance(result, ImageResult) else result.loss
        if score is not None and result.status == "done":
            label = result.label.rpartition(", seed")[0]
            settings = f"{label}, {result.data}, {result.steps}, {result.batch_size}, {result.lr}"
            cells.setdefault(((result.variant, result.tokens), settings), []).append(score)
    squares: dict[Place, float] = {}
    freedom: dict[Place, int] = {}
    for (place, _), scores in cells.items():
        if len(scores) > 1:
            squares[place] = squares.get(place, 0.0) + (len(scores) - 1) * float(np.var(scores, ddof=1))
            freedom[place] = freedom.get(place, 0) + len(scores) - 1
    return {place: math.sqrt(squares[place] / freedom[place]) for place in squares}


def _costs(runs: Sequence[Experiment], store: Store, estimate: Estimate) -> dict[Place, Cost]:
    """Sum the cost of the runs, by model and length."""
    unfinished_keys = {run.key for run in unfinished(runs, store)}
    costs: dict[Place, Cost] = {}
    for run in runs:
        place = (run.facts["variant"], run.facts["tokens"])
        todo = run.key in unfinished_keys
        left = estimate.seconds(run, share_left(run, store)) if todo else 0.0
        cost = Cost(1, estimate.seconds(run) / 3600, int(todo), left / 3600, isinstance(run, TrainedExperiment))
        costs[place] = _total([costs.get(place, Cost()), cost])
    return costs


def _total(costs: Iterable[Cost]) -> Cost:
    runs, hours, left, hours_left, trained = map(sum, zip(*costs, strict=True))
    return Cost(int(runs), hours, int(left), hours_left, int(trained))


def print_runs(runs: list[Experiment], store: Store, jobs: int, retry: bool, console: Console) -> None:
    """Print the runs, the state of each, and how long the remaining ones will take."""
    estimate = Estimate(store.results())
    left = {run.key for run in unfinished(runs, store, retry)}
    table = Table(box=SIMPLE_HEAD)
    for column in ("key", "run", "steps", "state", "time"):
        table.add_column(column, justify="right" if column in ("steps", "time") else "left", no_wrap=column != "run")
    total = longest = 0.0
    for run in runs:
        if run.key not in left:
            result = store.outcome(run.key)
            table.add_row(run.key, run.label, str(run.steps), result.status if result else "", "")
            continue
        share = share_left(run, store)
        seconds = estimate.seconds(run, share)
        total, longest = total + seconds, max(longest, seconds)
        state = "to do" if share == 1 else f"{1 - share:.0%} done"
        table.add_row(run.key, run.label, str(run.steps), state, spell_time(seconds))
    console.print(table)
    console.print(
        f"{len(left)} of {len(runs)} runs to do: {spell_time(total)} of computing, about "
        f"{spell_time(max(total / jobs, longest))} with {jobs} at a time ({estimate.source}).",
    )
