"""`nomax study NAME`: run a grid, draw its figures, and judge the claims."""

import math
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.text import Text

from nomax import _figures, study
from nomax.console import Console, Table
from nomax.data.source import DataError
from nomax.study.engine.experiment import ImageExperiment, TextExperiment
from nomax.study.engine.publication import Publication, neighbours
from nomax.study.engine.publish import NO_CLAIM, check_place, note, publish
from nomax.study.engine.runner import GridReport, parse_seconds, run_grid, shard, unique
from nomax.study.engine.store import Store
from nomax.study.engine.worker import Launcher, Processes, Submitit, submit_settings
from nomax.study.images import setup as images
from nomax.study.manage import print_plan, print_runs
from nomax.study.text import setup as text
from nomax.train.console import Stop
from nomax.train.distributed import check_device

if TYPE_CHECKING:
    from nomax.study.engine.verdict import Verdict

EXPECTED = (ValueError, TypeError, OSError, ImportError)
# What may go wrong later. Other errors are faults in the code of a study, and their traceback says where.
ACCIDENTS = (DataError, OSError)
COUNTS = ("patches", "image_size", "slots", "lengths", "vocabulary", "steps", "batch_size")
# Options that change some studies only; other studies' set-ups may have something else by that name.
ONLY_FOR = {"lengths": ("documents",), "slots": ("memory",)}
COLOURS = {"reproduced": "green", "contradicted": "red", "undecided": "yellow"}


@dataclass(frozen=True)
class Options:
    """Run a study: train its grid of models, draw its figures, and judge the paper's claims.

    `nomax study list` shows the studies. A run is identified by its complete settings. Runs that are in the store, from
    any study, or in the results folder or one beside it are not repeated; an interrupted run (Ctrl-C, SIGTERM, even
    kill -9) resumes where it stopped. Several processes can work on one store. A run that diverges is a result, and
    counts as chance; one that fails does not count.

    On several machines, give each --shard i/n and its own store, then use `nomax study merge`; or use --launcher
    submitit on a Slurm cluster. Exit codes: 0 success, 1 a run ended without an outcome (as on a full disk), or all new
    runs failed, 2 wrong options, 130 and 143 stopped by Ctrl-C and SIGTERM.
    """

    name: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="NAME")]]
    """A name from `nomax study list`, or a Python file with grid, figures and verdicts."""
    setup: str = "default"
    """default: minutes, a reduced grid. hour: one to two hours on two cores. Options down to --device change it."""
    data: str | None = None
    """A name (`nomax data list`), a folder of images, shards, "torchvision:NAME" or "hf:NAME"; for text, a name or a
    folder with train, valid and test files."""
    model: tuple[str, ...] | None = None
    """Model sizes, such as pico nano; or with their patch, such as S/32 S/16 S/8. Studies over both combine every size
    with every patch."""
    patches: tuple[int, ...] | None = None
    """Patch sizes, each of which gives a sequence length."""
    image_size: int | None = None
    """Image width and height in pixels; by default the images' own if they are small."""
    activations: tuple[str, ...] | None = None
    """Activations h to compare, for studies of all h."""
    alphas: tuple[float, ...] | None = None
    """Exponents of L."""
    slots: tuple[int, ...] | None = None
    """Slots of the feed-forward layers to compare, for the study of memories."""
    lengths: tuple[int, ...] | None = None
    """Document lengths in tokens to compare, for the study of documents."""
    vocabulary: int | None = None
    """Pieces in the vocabulary, for text studies."""
    seeds: tuple[int, ...] | None = None
    """One number: that many seeds, 0, 1, 2, … Several numbers: these seeds."""
    steps: int | None = None
    """Steps of each run."""
    batch_size: int | None = None
    """Images or tokens per step."""
    lr: float | None = None
    """Peak learning rate, the same for every φ."""
    warmup: int | None = None
    """Steps of linear warm-up."""
    recipe: Literal["small", "i1k", "i21k"] | None = None
    """Recipe to start from: the one for small images, or the paper's for ImageNet. The numbers above override it."""
    precision: Literal["fp32", "bf16"] | None = None
    """bf16: autocast, with float32 weights."""
    probes: tuple[str, ...] | None = None
    """Data sets for ten-shot probes, as in `nomax probe --on`, for studies that probe."""
    subset: str | None = None
    """Labels to measure accuracy on separately: icons, imagenet1k or a file; for studies that do so."""
    device: str | None = None
    """cpu, cuda, or auto to use a GPU if there is one."""

    jobs: int | None = None
    """Runs at a time, each in a single-threaded process; by default, one per core."""
    shard: str | None = None
    """i/n: do only the i-th of n parts of the grid, i from 1 to n. A run's part depends only on its settings."""
    budget: str | None = None
    """2h, 90m, …: start no run that is estimated to end later, and stop then; the same command continues."""
    retry: bool = False
    """Try failed runs again. (Those that diverged would diverge again.)"""
    launcher: Literal["processes", "submitit"] = "processes"
    """Do the runs on this machine, or as jobs on a cluster."""
    submit: tuple[str, ...] = ()
    """For submitit: KEY=VALUE, such as slurm_partition=gpu timeout_min=240 gpus_per_node=1, or cluster=local."""
    store: Path = Path("runs/study")
    """Folder of all runs of all studies."""
    out: Path | None = None
    """Folder for the results; by default results/NAME."""
    dry_run: bool = False
    """List the runs with the time each will take, and exit."""
    plan: bool = False
    """Print the core-hours by model, the noise between seeds (estimated from finished runs), the expected width of the
    intervals with the planned seeds, and the number of seeds each claim needs, and exit."""
    fresh: bool = False
    """Do all runs that are not in the store, even if their results are already in the results folder."""
    smoke: bool = False
    """Shrink everything to seconds, only to check that it works."""


def run(options: Options) -> int:
    """Run a study. See Options for the exit codes."""
    console = Console()
    try:
        module = study.load(options.name)
        setup = chosen_setup(options, module)
        _check_device(options)
        grid = unique(module.grid(setup, setup.seeds))
        mine = shard(grid, options.shard)
        store = Store(options.store, create=False)
        budget = None if options.budget is None else parse_seconds(options.budget)
        images.check([run for run in mine if isinstance(run, ImageExperiment)], options.probes or ())
        command, name = command_line(options), study.short(options.name)
        out = options.out or (store.place if options.smoke else Path()) / "results" / name
        anew = options.fresh or options.smoke
        published = {} if anew else {out: Publication.read(out), **neighbours(out)}
        for folder, each in published.items():
            if lent := each.lend(store, grid):
                console.print(f"{lent} runs are taken over from {folder}; --fresh does them again.")
        before = published.pop(out, Publication())
        if options.plan:
            sources = {
                "the runs of this plan": store.results([run.key for run in grid]),
                "earlier runs in the store": store.results(study=name),
                f"the runs published in {out}": list(before.results.values()),
            }
            elsewhere = [result for each in published.values() for result in each.results.values()]
            print_plan(module, setup, mine, store, sources, elsewhere, console)
            return 0
        if options.dry_run:
            print_runs(mine, store, _jobs(options), options.retry, console)
            return 0
        _figures.require()
        text.check([run for run in mine if isinstance(run, TextExperiment)])
        check_place(out, setup, len(grid))
        for option, folder in (("--store", options.store), ("--out", out)):
            _check_writable(option, folder)
        launcher = _launcher(options, store, command, len(mine))
    except EXPECTED as error:
        print(f"nomax study: {error}", file=sys.stderr)
        return 2
    try:
        store = Store(options.store)
        before = before.joined(published.values(), grid)
        before.lend(store, grid)
        with Stop() as stop:
            report = run_grid(mine, store, launcher, stop, console, study=name, retry=options.retry, budget=budget)
            if stop.asked:
                console.print(f"Stopped; {len(report.left)} runs are left. The same command goes on.")
                return stop.exit_code
        _tell(report, console)
        results = store.results([run.key for run in grid])
        missing = len(grid) - len(results)
        if missing and options.shard:
            console.print(
                f"This part is done, {missing} runs of other parts are not here: join the stores with "
                "`nomax study merge`, then give the same command without --shard.",
            )
            return report.exit_code
        check_place(out, setup, sum(result.status != "failed" for result in results))
        with console.status("Figures and verdicts …"):
            verdicts = publish(module, setup, grid, store, name=name, out=out, command=command, before=before)
    except ACCIDENTS as error:
        print(f"nomax study: {error}", file=sys.stderr)
        return 1
    console.print(verdict_table(module.TITLE, verdicts, note(setup, missing)) if verdicts else NO_CLAIM)
    usual = out.parent.resolve() == Path("results").resolve()
    page = "nomax report" if usual else f"nomax report {shlex.quote(str(out))}"
    console.print(f"Figures, verdicts and numbers: {out}. The page with all of it: {page}")
    return report.exit_code


def chosen_setup(options: Options, module: study.Study) -> Any:
    """Return the named set-up with the options' changes."""
    kind = study.kind(module)
    setup = study.named_setup(module, options.setup)
    setup = study.named_setup(module, "smoke") if options.smoke else setup
    _check_values(options, kind)
    for name, studies in ONLY_FOR.items():
        of_file = options.name.endswith(".py") and kind == "text"  # which may read whatever a set-up of text has
        if getattr(options, name) is not None and options.name not in studies and not of_file:
            raise ValueError(
                f"--{name} is not for {options.name}, which is a study of {kind}: {', '.join(studies)} takes it."
            )
    own, other = (_setup_options(each) for each in (kind, "text" if kind == "images" else "images"))
    for name in other - own:
        if getattr(options, name, None) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is not for {options.name}, which is a study of {kind}.")
    given = {name: value for name, value in vars(options).items() if name in own - {"name"}}
    seeds = options.seeds
    if seeds is not None and len(seeds) == 1:
        if seeds[0] < 1:
            raise ValueError(f"--seeds {seeds[0]} must be at least 1: it is the number of seeds.")
        seeds = tuple(range(seeds[0]))
    if seeds is not None and (len(set(seeds)) < len(seeds) or min(seeds) < 0):
        raise ValueError(f"--seeds {' '.join(map(str, seeds))}: seeds must be different and not negative.")
    return setup.adapted(**given | {"seeds": seeds})


def _setup_options(kind: Literal["images", "text"]) -> set[str]:
    """Return the options that change a set-up of this kind."""
    names = {field.name for field in fields(study.setups(kind)["default"])}
    return names | ({"model"} if kind == "images" else set())


def _check_values(options: Options, kind: Literal["images", "text"]) -> None:
    """Raise an error for an option without a value, or for a number of the wrong kind."""
    least = dict.fromkeys(COUNTS, 1) | {"warmup": 1 if kind == "images" else 0}
    for name, value in vars(options).items():
        option = f"--{name.replace('_', '-')}"
        if value == () and name not in ("submit", "probes"):
            raise ValueError(f"{option} needs at least one value.")
        numbers = (value if isinstance(value, tuple) else (value,)) if name in least and value is not None else ()
        for number in numbers:
            if number < least[name]:
                raise ValueError(f"{option} {number} must be at least {least[name]}.")
    if options.lr is not None and not 0 < options.lr < math.inf:
        raise ValueError(f"--lr {options.lr:g} must be a positive number.")
    if options.alphas is not None and not all(map(math.isfinite, options.alphas)):
        raise ValueError(f"--alphas {' '.join(f'{alpha:g}' for alpha in options.alphas)} must be finite numbers.")


def command_line(options: Options) -> str:
    """Return the command line that gives these options, without those that only affect how the work is done."""
    words = ["nomax", "study", options.name]
    how = {"name", "jobs", "shard", "budget", "retry", "launcher", "submit", "store", "out", "dry_run", "device"}
    how |= {"plan", "fresh"}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in how or value == field.default:
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        if not isinstance(value, bool):
            words += [str(part) for part in (value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def verdict_table(title: str, verdicts: "Sequence[Verdict]", note: str) -> Table:
    """Return the verdicts as a table for the terminal."""
    table = Table(box=SIMPLE_HEAD, title=title, caption=note or None, title_style="bold", caption_justify="left")
    for column in ("claim", "verdict", "measured"):
        table.add_column(column, max_width=60)  # sentences, which a pipe would show on one line each
    for verdict in verdicts:
        outcome = str(verdict.verdict)
        measured = f"{verdict.sentence} {verdict.needed}".strip()
        table.add_row(verdict.text, Text(outcome, COLOURS.get(outcome, "")), measured)
    return table


def _check_writable(option: str, folder: Path) -> None:
    """Raise unless a folder, which may not exist yet, can be written to."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{option} {folder}: {there} is not a folder to write to ({error.strerror}).") from error


def _check_device(options: Options) -> None:
    """Raise if runs cannot be done on the device; a cluster's device cannot be tried here."""
    check_device(options.device or "auto", options.launcher == "processes" or "cluster=local" in options.submit)


def _launcher(options: Options, store: Store, command: str, runs: int) -> Launcher:
    if options.launcher == "processes":
        if options.submit:
            raise ValueError("--submit is for --launcher submitit.")
        return Processes(store.place, command, options.retry, _jobs(options))
    given = submit_settings(options.submit)
    here = given.get("cluster") == "local"  # a real cluster has a queue of its own
    limit = _jobs(options) if here or options.jobs else max(1, runs)
    return Submitit(store.place, command, options.retry, limit, given)


def _jobs(options: Options) -> int:
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs} must be at least 1.")
    if options.jobs:
        return options.jobs
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _tell(report: GridReport, console: Console) -> None:
    trouble = [result for result in report.finished if result.status != "done"]
    if trouble:
        words = ", ".join(f"{result.label} ({result.status})" for result in trouble[:5]) + (
            ", …" if len(trouble) > 5 else ""
        )
        console.print(f"{len(trouble)} runs diverged or failed: {words}.")
    if any(result.status == "failed" for result in trouble):
        console.print("To try those that failed again: the same command with --retry.")
    if report.left:
        console.print(f"{len(report.left)} runs are left. The same command goes on.")
