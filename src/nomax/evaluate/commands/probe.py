"""`nomax probe`: what a linear read-out of a model's features learns from a few images of other data sets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD

from nomax.console import Console, Progress, Table
from nomax.data import Source
from nomax.evaluate import fewshot
from nomax.evaluate.commands import terminal
from nomax.evaluate.features import features
from nomax.evaluate.runs import Run, load_all
from nomax.evaluate.sources import first_of_each, part, probe_sets


@dataclass(frozen=True)
class Options:
    """Probe trained models with a few labelled images of data sets that they were not trained on.

    The protocol is big_vision's, as in Wortsman et al.: features of the frozen model, whitened; ridge regression on a
    few images per class; accuracy on the whole test split; mean and standard deviation over the seeds that choose the
    images. Several runs share one table, e.g. nomax probe runs/softmax runs/relu --on digits cifar10

    Names of data sets: those of `nomax data list` (mnist, fashion-mnist, cifar10, emoji, digits, …), and the eight of
    Wortsman et al.: birds, caltech101, cars, cifar100, dtd, col_hist, pets, uc_merced. Four of the eight come through
    torchvision where the network allows; the others, and your own, need a place: --on birds=FOLDER
    """

    runs: terminal.Runs
    """Run folders that `nomax train` wrote, saved models, or models of the hub."""
    on: tuple[str, ...] = ("fashion-mnist-small",)
    """Data sets: NAME, or NAME=PLACE with a folder (train/CLASS/*, test/CLASS/*), shards, torchvision:… or hf:…"""
    shots: tuple[int, ...] = fewshot.SHOTS
    """Training images per class. The paper reports 10."""
    seeds: int = len(fewshot.SEEDS)
    """How many choices of training images: seeds 0, 1, 2, …"""
    l2: float = fewshot.RIDGE
    """The ridge regression's regulariser."""
    batch_size: int = 64
    """Images that pass through the model at a time."""
    workers: int = 0
    """Processes that prepare images."""
    device: str | None = None
    """cpu, cuda, …; if not given, a GPU if there is one."""
    output: Path | None = None
    """Write every accuracy into this JSON file, too."""
    smoke: bool = False
    """Try it on a handful of images of three classes: shows only that it works."""


def run(options: Options) -> int:
    """Return 0, 2 if the options cannot be served, or 1 if the results cannot be written."""
    console = Console()
    try:
        terminal.check_output(options.output)
        seeds = tuple(range(options.seeds))
        fewshot.check_numbers(options.shots, seeds, (options.l2,))
        sets = probe_sets(options.on)
        runs = load_all(options.runs, options.device)
        if options.smoke:
            sets = {name: (first_of_each(a, 3, 4), first_of_each(b, 3, 4)) for name, (a, b) in sets.items()}
        with terminal.progress(console) as progress:
            found = [
                {
                    "run": run.title,
                    "phi": run.model.config.phi,
                    "on": name,
                    "accuracy": _probe(options, seeds, run, name, pair, progress),
                }
                for name, pair in sets.items()
                for run in runs
            ]
    except terminal.EXPECTED as error:
        return terminal.tell("probe", error)
    console.print(_table(options, [run.title for run in runs], found))
    settings = {"shots": options.shots, "seeds": seeds, "l2": options.l2, "smoke": options.smoke}
    return terminal.output("probe", options.output, settings | {"results": found}, console)


def _probe(
    options: Options, seeds: tuple[int, ...], run: Run, name: str, pair: tuple[Source, Source], progress: Progress
) -> dict[int, list[float]]:
    """The accuracy of each seed, by the number of shots."""
    train, test = pair
    places = fewshot.needed(train.labels, options.shots, seeds)
    report = terminal.advancing(progress, f"{name}, {run.title}", len(places) + len(test))
    settings: dict[str, Any] = {"batch_size": options.batch_size, "workers": options.workers, "report": report}
    train_x, _ = features(run.model, part(train, places), **settings)
    test_x, test_y = features(run.model, test, **settings)
    numbers = (options.shots, seeds, (options.l2,))
    found = fewshot.accuracies(train_x, train.labels, test_x, test_y, *numbers, places=places)
    return {shots: by_seed[:, 0].tolist() for shots, by_seed in zip(options.shots, found, strict=True)}


def _table(options: Options, titles: list[str], found: list[dict[str, Any]]) -> Table:
    caption = f"Accuracy in %, mean ± standard deviation over {options.seeds} seeds; l2 = {options.l2:g}."
    if options.smoke:
        caption = "A smoke run: these numbers mean nothing."
    table = Table(box=SIMPLE_HEAD, title="Few-shot probe", caption=caption, title_style="bold", caption_justify="left")
    table.add_column("data set")
    table.add_column("run")
    for shots in options.shots:
        table.add_column(f"{shots} shot{'s' * (shots > 1)}", justify="right", no_wrap=True)
    names = list(dict.fromkeys(entry["on"] for entry in found))
    for entry in found:
        cells = [_cell(np.array(entry["accuracy"][shots])) for shots in options.shots]
        table.add_row(entry["on"] if entry["run"] == titles[0] else "", entry["run"], *cells)
        if entry["run"] == titles[-1]:
            table.add_section()
    if len(names) > 1:
        for title in titles:
            # The mean over data sets of each seed, so that ± is again over seeds.
            mine = [entry["accuracy"] for entry in found if entry["run"] == title]
            cells = [_cell(np.mean([accuracy[shots] for accuracy in mine], 0)) for shots in options.shots]
            table.add_row("average" if title == titles[0] else "", title, *cells)
    return table


def _cell(by_seed: Any) -> str:
    spread = f" ± {100 * by_seed.std(ddof=1):.1f}" if len(by_seed) > 1 else ""
    return f"{100 * by_seed.mean():.1f}{spread}"
