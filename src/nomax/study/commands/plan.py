"""`nomax study NAME --plan` and `--dry-run`: estimate the cost of a study, and what it will be able to decide."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD

from nomax.console import Console, Table
from nomax.study import Study
from nomax.study.engine.experiment import Experiment, TrainedExperiment
from nomax.study.engine.result import ImageResult, Result, TrainedResult, finals
from nomax.study.engine.runner import Estimate, share_left, spell_time, unfinished
from nomax.study.engine.statistics import accuracy, student
from nomax.study.engine.store import Store
from nomax.study.engine.verdict import amount

NOTHING = "–"
Place = tuple[str, int]  # a model and its length


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
    console: Console,
) -> None:
    """Print hours and noise by model, and what the planned seeds can decide about each claim.

    sources: finished runs by origin, the best source first; the noise is taken from the first source whose runs repeat
    a setting. Raises a ValueError if none does.
    """
    estimate = Estimate({result.key: result for results in sources.values() for result in results}.values())
    number = len(setup.seeds)
    origin, results = next(((name, found) for name, found in sources.items() if noise(found)), ("", []))
    known, costs = noise(results), _costs(runs, store, estimate)
    unit = "points" if any(isinstance(result, ImageResult) for result in results) else "nats"
    typical = math.sqrt(fmean(found**2 for found in known.values())) if known else math.nan
    table = Table(box=SIMPLE_HEAD)
    for column in ("model", "L", "runs", "core-hours", "to do", "core-hours", "noise of a seed", f"±, {number} seeds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for place, cost in costs.items():
        deviation = known.get(place, typical) if cost.trained else math.nan
        # A difference of two runs has the noise of both.
        width = student(number - 1) * deviation * math.sqrt(2 / number) if number > 1 else math.nan
        said = [amount(value, unit) if value == value else NOTHING for value in (deviation, width)]
        table.add_row(place[0], str(place[1]), *cost.cells, *said)
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
            said = [amount(value, each.unit) for value in (width, each.margin)]
            if each.over == "settings":
                cells = [f"{wanted or 'over 1,000'} settings", ""]
            else:
                cells = [str(wanted or "over 1,000"), "" if wanted is None else f"{hours * wanted:.1f}"]
            table.add_row(verdict.claim, name, *said, *cells)
    if table.row_count:
        console.print(table)


def noise(results: Sequence[Result]) -> dict[Place, float]:
    """Return the standard deviation of scores between seeds, by model and length, over all repeated settings."""
    cells: dict[tuple[Place, str], list[float]] = {}
    for result in finals(results):
        score = _score(result)
        if score is not None and result.status == "done":
            label = result.label.rpartition(", seed")[0]
            settings = f"{label}, {result.data}, {result.steps}, {result.batch_size}, {result.lr}"
            cells.setdefault(((result.variant, result.tokens), settings), []).append(score)
    variances: dict[Place, list[tuple[float, int]]] = {}
    for (place, _), scores in cells.items():
        if len(scores) > 1:
            variances.setdefault(place, []).append((float(np.var(scores, ddof=1)), len(scores) - 1))
    return {
        place: math.sqrt(sum(variance * freedom for variance, freedom in found) / sum(freedom for _, freedom in found))
        for place, found in variances.items()
    }


def _score(result: TrainedResult) -> float | None:
    return accuracy(result) if isinstance(result, ImageResult) else result.loss


def _costs(runs: Sequence[Experiment], store: Store, estimate: Estimate) -> dict[Place, Cost]:
    """Sum the cost of the runs, by model and length."""
    unfinished_keys = {run.key for run in unfinished(runs, store)}
    costs: dict[Place, Cost] = {}
    for run in runs:
        place = (run.facts["variant"], run.facts["tokens"])
        todo = run.key in unfinished_keys
        left = estimate.seconds(run, share_left(run, store)) if todo else 0.0
        one = Cost(1, estimate.seconds(run) / 3600, int(todo), left / 3600, isinstance(run, TrainedExperiment))
        costs[place] = _total([costs.get(place, Cost()), one])
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
