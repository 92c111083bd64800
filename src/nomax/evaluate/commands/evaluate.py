"""`nomax evaluate`: how good trained models are: accuracy on images, BLEU or perplexity on text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD

from nomax.console import Console, Progress, Table
from nomax.evaluate.accuracy import Match, Score, classify, match_classes
from nomax.evaluate.commands import evaluate_text, terminal
from nomax.evaluate.runs import Run, TextRun, load_mixed
from nomax.evaluate.sources import first_of_each
from nomax.evaluate.subset import LabelMap, named


@dataclass(frozen=True)
class Options:
    """Measure the accuracy of trained models on test images, BLEU and chrF of translations, perplexity of text.

    With --subset the top class among some columns of the head counts, without fine-tuning. That is how Wortsman et al.
    report ImageNet-1k accuracy of models of ImageNet-21k: nomax evaluate RUN --data IMAGENET --subset imagenet1k. Where
    the data set has all of the head's classes, only images of the subset's classes count for it: --subset icons.

    BLEU and chrF are sacrebleu's, printed with their signatures, over single segments; for runs of documents also over
    whole documents.
    """

    runs: terminal.Runs
    """Run folders that `nomax train` wrote, saved models, or models of the hub."""
    data: str | None = None
    """A name (`nomax data list`), a folder, shards, torchvision:… or hf:…, or text files; if not given, each run's own
    data set."""
    split: str = "test"
    """Which part of the data set. Text files have no parts: if --data names some, all of them."""
    held_out: float | None = None
    """With --data of images: the share that is held out as test split, as in `nomax train vit`. A run knows its own."""
    match_classes: Match = "name"
    """How classes of --data are found among the model's: by name, which is an error where names differ, or in their
    order, whatever they are called."""
    on_error: Literal["raise", "skip"] | None = None
    """Stop at a broken image, or leave it out; if not given, as the run was trained for its own data, else raise."""
    subset: str | None = None
    """imagenet1k (of 21,843 classes), icons (with at least 30 drawings), or a file: one column or class per line."""
    beams: int = 4
    """Of a translation: how many hypotheses are extended; 1 is greedy."""
    length_penalty: float = 0.6
    """Of a translation: 0 compares probabilities, more favours longer ones."""
    batch_size: int = 64
    """Images that pass through the model at a time; of text, 64 times as many tokens."""
    workers: int = 0
    """Processes that prepare images."""
    device: str | None = None
    """cpu, cuda, …; if not given, a GPU if there is one."""
    output: Path | None = None
    """Write the results into this JSON file, too."""
    smoke: bool = False
    """Try it on two images of each of the first three classes, or on four segments: shows only that it works."""


def run(options: Options) -> int:
    """Return 0, 2 if the options cannot be served, or 1 if the results cannot be written."""
    console = Console()
    try:
        terminal.check_output(options.output)
        runs = load_mixed(options.runs, options.device)
        images = [one for one in runs if isinstance(one, Run)]
        texts = [one for one in runs if isinstance(one, TextRun)]
        with terminal.progress(console) as progress:
            found = [_evaluate(options, one, progress) for one in images]
            read = [evaluate_text.evaluate(options, one, progress) for one in texts]
    except terminal.EXPECTED as error:
        return terminal.tell("evaluate", error)
    if found:
        console.print(_table(options, found))
        for note in dict.fromkeys(entry["note"] for entry in found if entry["note"]):
            console.print(note)
    evaluate_text.show(read, options.smoke, console)
    found += read
    return terminal.output("evaluate", options.output, {"smoke": options.smoke, "results": found}, console)


def _evaluate(options: Options, one: Run, progress: Progress) -> dict[str, Any]:
    place = options.data or one.data
    source = one.images(options.split, options.data, options.on_error, options.held_out)
    subset = None if options.subset is None else named(options.subset, one.model.config.classes or source.classes)
    note = match_classes(one.model, source, subset, options.match_classes).note
    source = first_of_each(source, 3, 2) if options.smoke else source
    scores = classify(
        one.model,
        source,
        one.transform,
        subset,
        match=options.match_classes,
        batch_size=options.batch_size,
        workers=options.workers,
        report=terminal.advancing(progress, one.title, len(source)),
    )
    plain = {name: _plain(score) for name, score in zip(("accuracy", "subset_accuracy"), scores, strict=True)}
    about = {"run": one.title, "phi": one.model.config.phi, "data": place, "split": options.split}
    notes = [text for text in (note and f"{one.title}: {note}", _note(subset)) if text]
    return about | {"subset": options.subset, "note": "\n".join(notes)} | plain


def _plain(score: Score | None) -> dict[str, Any] | None:
    return None if score is None else {"accuracy": score.accuracy, "right": score.right, "images": score.images}


def _note(subset: LabelMap | None) -> str:
    if subset is None or not subset.absent:
        return ""
    names = ", ".join(subset.names[place] for place in subset.absent[:5])
    number = len(subset.absent)
    return f"The head has no column for {number} of the subset's classes ({names}): their images count as wrong."


def _table(options: Options, found: list[dict[str, Any]]) -> Table:
    caption = "A smoke run: these numbers mean nothing." if options.smoke else None
    table = Table(box=SIMPLE_HEAD, title="Accuracy", caption=caption, title_style="bold", caption_justify="left")
    for name in ("run", "data set"):
        table.add_column(name)
    columns = {"all classes": "accuracy"} | ({f"among {options.subset}": "subset_accuracy"} if options.subset else {})
    for name in columns:
        table.add_column(name, justify="right")
        table.add_column("images", justify="right")
    for entry in found:
        cells = [text for name in columns.values() for text in _cells(entry[name])]
        table.add_row(entry["run"], f"{entry['data']} ({entry['split']})", *cells)
    return table


def _cells(score: dict[str, Any] | None) -> tuple[str, str]:
    return ("–", "–") if score is None else (f"{100 * score['accuracy']:.2f}%", f"{score['images']:,}")
