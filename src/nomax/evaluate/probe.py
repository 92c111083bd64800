"""`nomax probe`: few-shot accuracy of a linear read-out of a model's features on other data sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nomax import data
from nomax.console import Console, Progress, Table, counting
from nomax.data import Source
from nomax.data.source import part
from nomax.evaluate import fewshot, terminal
from nomax.evaluate.runs import TrainedImageModel, load, load_all


@dataclass(frozen=True)
class Options:
    """Probe trained models with a few labelled images of data sets that they were not trained on.

    The protocol is big_vision's, as in Wortsman et al.: features of the frozen model, whitened; ridge regression on a
    few images per class; accuracy on the whole test split; mean and standard deviation over the seeds that choose the
    images. Several runs share one table, e.g. nomax probe runs/softmax runs/relu --on digits cifar10

    Names of data sets: those of `nomax data list` (mnist, fashion-mnist, cifar10, emoji, digits, …), and the eight of
    Wortsman et al.: birds, caltech101, cars, cifar100, dtd, col_hist, pets, uc_merced. Each is read as its authors
    publish it, unpacked: --on birds=FOLDER. Without a folder, four of them come through torchvision where the network
    allows.
    """

    runs: terminal.Runs
    on: tuple[str, ...] = ("fashion-mnist-small",)
    """Data sets: NAME, or NAME=PLACE with a folder (as published, or train/CLASS/* and test/CLASS/*), shards,
    torchvision:… or hf:…"""
    shots: tuple[int, ...] = fewshot.SHOTS
    """Training images per class. The paper reports 10."""
    seeds: int = len(fewshot.SEEDS)
    """Number of choices of training images: seeds 0, 1, 2, …"""
    l2: float = fewshot.RIDGE
    """The ridge regression's regulariser."""
    on_error: Literal["raise", "skip"] = "raise"
    """Stop at a broken image, or go on as if the data set did not have it."""
    batch_size: terminal.BatchSize = 64
    workers: terminal.Workers = 0
    device: terminal.Device = None
    output: terminal.Output = None
    smoke: bool = False
    """Try it on a handful of images of three classes: shows only that it works."""


def run(options: Options) -> int:
    """Print the results and write them. Return 0, or 1 if they cannot be written."""
    console = Console()
    terminal.check_output(options.output)
    fewshot.check_numbers(options.shots, range(options.seeds), (options.l2,))
    sets = probe_sets(options.on, options.on_error)
    loaded = load_all(options.runs, options.device, load)
    if options.smoke:
        small = terminal.first_images
        sets = {name: (small(train, 3, 4), small(test, 3, 4)) for name, (train, test) in sets.items()}
    with counting(console) as progress:
        results = [
            {
                "run": trained.title,
                "phi": trained.model.config.phi,
                "on": name,
                "accuracy": _probe(options, trained, name, both, progress),
            }
            for name, both in sets.items()
            for trained in loaded
        ]
    console.print(_table(options, [trained.title for trained in loaded], results))
    settings = {"shots": options.shots, "seeds": list(range(options.seeds)), "l2": options.l2, "smoke": options.smoke}
    return terminal.write_results("probe", options.output, settings | {"results": results}, console)


def _probe(
    options: Options, trained: TrainedImageModel, name: str, both: tuple[Source, Source], progress: Progress
) -> dict[int, list[float]]:
    """Return the accuracy of each seed, by the number of shots."""
    (train, test), seeds = both, range(options.seeds)
    total = len(fewshot.needed(train.labels, options.shots, seeds)) + len(test)
    report = terminal.add_bar(progress, f"{name}, {trained.title}", total)
    settings: dict[str, Any] = {"batch_size": options.batch_size, "workers": options.workers, "report": report}
    train_x, train_y, places = fewshot.shot_features(trained.model, train, options.shots, seeds, **settings)
    test_x, test_y = fewshot.features(trained.model, test, **settings)
    accuracies = fewshot.accuracies(
        train_x, train_y, test_x, test_y, shots=options.shots, seeds=seeds, l2=(options.l2,), places=places
    )
    return {shots: by_seed[:, 0].tolist() for shots, by_seed in zip(options.shots, accuracies, strict=True)}


def _table(options: Options, titles: list[str], results: list[dict[str, Any]]) -> Table:
    caption = f"Accuracy in %, mean ± standard deviation over {options.seeds} seeds; l2 = {options.l2:g}."
    numbers = [f"{shots} shot{'s' * (shots > 1)}" for shots in options.shots]
    caption = terminal.SMOKE if options.smoke else caption
    table = terminal.results_table("Few-shot probe", caption, ("data set", "run"), numbers)
    for entry in results:
        cells = [_cell(np.array(entry["accuracy"][shots])) for shots in options.shots]
        table.add_row(entry["on"] if entry["run"] == titles[0] else "", entry["run"], *cells)
        if entry["run"] == titles[-1]:
            table.add_section()
    if len(results) > len(titles):
        for title in titles:
            # The mean over data sets of each seed, so that ± is again over seeds.
            mine = [entry["accuracy"] for entry in results if entry["run"] == title]
            cells = [_cell(np.mean([accuracy[shots] for accuracy in mine], 0)) for shots in options.shots]
            table.add_row("average" if title == titles[0] else "", title, *cells)
    return table


def _cell(by_seed: Any) -> str:
    spread = f" ± {100 * by_seed.std(ddof=1):.1f}" if len(by_seed) > 1 else ""
    return f"{100 * by_seed.mean():.1f}{spread}"


@dataclass(frozen=True)
class PaperSet:
    """One of the eight data sets of Wortsman et al.: its default place, and how it is split."""

    title: str
    place: str | None = None
    cut: int | None = None
    """If it has no test split: the number of images to train on; the others are the test."""


PAPER = {
    "birds": PaperSet("Caltech-UCSD Birds 200-2011"),
    "caltech101": PaperSet("Caltech-101 (30 training images per class)"),
    "cars": PaperSet("Stanford Cars", "torchvision:StanfordCars"),
    "cifar100": PaperSet("CIFAR-100", "torchvision:CIFAR100"),
    "dtd": PaperSet("Describable Textures", "torchvision:DTD"),
    "col_hist": PaperSet("Colorectal Histology, 5,000 images", cut=2000),
    "pets": PaperSet("Oxford-IIIT Pets", "torchvision:OxfordIIITPet"),
    "uc_merced": PaperSet("UC Merced land use, 2,100 images", cut=1000),
}


def probe_sets(wanted: Sequence[str], on_error: str = "raise") -> dict[str, tuple[Source, Source]]:
    """Load the train and test images of data sets given as "NAME" or "NAME=PLACE", the place as data.load takes it."""
    sets: dict[str, tuple[Source, Source]] = {}
    for text in wanted:
        name, _, place = text.partition("=")
        if name in sets:
            raise ValueError(f"--on names {name!r} twice.")
        sets[name] = _train_and_test(name, place, on_error)
    return sets


def _train_and_test(name: str, place: str, on_error: str) -> tuple[Source, Source]:
    known = PAPER.get(name) or PaperSet(name, name)
    place = place or known.place or ""
    if not place:
        inside = "PATH/CLASS/*" if known.cut else "PATH/train/CLASS/* and PATH/test/CLASS/*"
        raise ValueError(
            f"{name} ({known.title}) has no source of its own. Give its folder: --on {name}=PATH (as its authors "
            f"publish it, or {inside})."
        )
    if known.cut is None:
        train, test = (data.load(place, split, on_error=on_error) for split in ("train", "test"))
        if tuple(train.classes) != tuple(test.classes):
            odd = ", ".join(sorted(set(train.classes) ^ set(test.classes))[:5]) or "in order"
            raise ValueError(f"{name}: its train and test images have different classes: {odd}.")
        return train, test
    # The papers cut the order of TensorFlow Datasets; a folder is in the order of its classes, so it is shuffled first.
    whole = data.load(place, "train", on_error=on_error)
    order = np.random.default_rng(0).permutation(len(whole))
    if len(order) <= known.cut:
        raise ValueError(
            f"{name} has {len(order)} images in {place}; {known.cut} for training leave none for the test."
        )
    return part(whole, order[: known.cut]), part(whole, order[known.cut :])
