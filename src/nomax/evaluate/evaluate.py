"""`nomax evaluate`: how good trained models are: accuracy on images, BLEU or perplexity on text."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nomax.console import Console, Progress, Table
from nomax.data.text import Corpus, Document
from nomax.evaluate import terminal, translation
from nomax.evaluate.accuracy import LabelMap, Match, Score, classify, load_subset, match_classes
from nomax.evaluate.runs import TrainedImageModel, TrainedTextModel, load_all, load_any
from nomax.train.console import perplexity

Result = dict[str, Any]


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
    """Part of the data set. Text files have no parts: if --data names some, all of them."""
    held_out: float | None = None
    """With --data of images: the share that is held out as test split, as in `nomax train vit`. A run knows its own."""
    match_classes: Match = "name"
    """Find classes of --data among the model's by name, which is an error where names differ, or in their order,
    whatever they are called."""
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
        loaded = load_all(options.runs, options.device, load_any)
        with terminal.progress(console) as progress:
            images = [_evaluate_images(options, one, progress) for one in loaded if isinstance(one, TrainedImageModel)]
            texts = [_evaluate_text(options, one, progress) for one in loaded if isinstance(one, TrainedTextModel)]
    except terminal.EXPECTED as error:
        return terminal.print_error("evaluate", error)
    if images:
        console.print(_accuracies(options, images))
        for note in dict.fromkeys(entry["note"] for entry in images if entry["note"]):
            console.print(note)
    if translations := [entry for entry in texts if "segments" in entry]:
        console.print(_translations(options, translations))
        for note in [*dict.fromkeys(_signatures(translations)), *_uneven(translations)]:
            console.print(note)
    if languages := [entry for entry in texts if "segments" not in entry]:
        console.print(_perplexities(options, languages))
    content = {"smoke": options.smoke, "results": images + texts}
    return terminal.write_results("evaluate", options.output, content, console)


def _evaluate_images(options: Options, trained: TrainedImageModel, progress: Progress) -> Result:
    place = options.data or trained.data
    source = trained.images(options.split, options.data, options.on_error, options.held_out)
    classes = trained.model.config.classes or source.classes
    subset = None if options.subset is None else load_subset(options.subset, classes)
    note = match_classes(trained.model, source, subset, options.match_classes).note
    source = terminal.first_images(source, 3, 2) if options.smoke else source
    scores = classify(
        trained.model,
        source,
        trained.transform,
        subset,
        match=options.match_classes,
        batch_size=options.batch_size,
        workers=options.workers,
        report=terminal.add_bar(progress, trained.title, len(source)),
    )
    plain = {name: _plain(score) for name, score in zip(("accuracy", "subset_accuracy"), scores, strict=True)}
    about = {"run": trained.title, "phi": trained.model.config.phi, "data": place, "split": options.split}
    notes = [text for text in (note and f"{trained.title}: {note}", _absent(subset)) if text]
    return about | {"subset": options.subset, "note": "\n".join(notes)} | plain


def _plain(score: Score | None) -> Result | None:
    return None if score is None else {"accuracy": score.accuracy, "right": score.right, "images": score.images}


def _absent(subset: LabelMap | None) -> str:
    if subset is None or not subset.absent:
        return ""
    names = ", ".join(subset.names[place] for place in subset.absent[:5])
    number = len(subset.absent)
    return f"The head has no column for {number} of the subset's classes ({names}): their images count as wrong."


def _evaluate_text(options: Options, trained: TrainedTextModel, progress: Progress) -> Result:
    search = translation.search_settings(options.beams, options.length_penalty, options.batch_size)
    corpus, split = trained.corpus(options.data, options.split)
    if options.smoke:
        first = corpus.documents[0]
        corpus = Corpus((Document(first.name, first.pairs[:4]),), corpus.languages, corpus.title)
    about: Result = {"run": trained.title, "phi": trained.model.config.phi, "data": options.data or trained.config.data}
    about |= {"split": split, "languages": list(corpus.languages)}
    parts = (trained.model, trained.tokenizer, trained.config, corpus)
    start = partial(terminal.add_bar, progress, f"{trained.title}, likelihood")
    likelihood = translation.likelihood(*parts, search.tokens, start)
    nll = likelihood.per_token
    about |= {"perplexity": perplexity(nll), "nll": nll, "tokens": likelihood.tokens}
    if not trained.translates:
        return about | {"bits_per_character": likelihood.bits_per_character}
    try:
        start = partial(terminal.add_bar, progress, f"{trained.title}, translations")
        translations = translation.translate_corpus(*parts, search, start)
    except FloatingPointError as error:
        raise FloatingPointError(f"{trained.title}: {error}") from error
    segments, documents = translation.references(corpus)
    about |= {"search": asdict(search), "segments": asdict(translation.quality(translations.segments, segments))}
    if trained.config.documents:
        whole = asdict(translation.quality(translations.documents, documents))
        about |= {"documents": whole, "stretches": translations.stretches, "uneven": translations.uneven}
    return about


def _accuracies(options: Options, results: list[Result]) -> Table:
    table = _table("Accuracy", options)
    columns = {"all classes": "accuracy"} | ({f"among {options.subset}": "subset_accuracy"} if options.subset else {})
    for name in columns:
        table.add_column(name, justify="right")
        table.add_column("images", justify="right")
    for entry in results:
        scores = [entry[name] for name in columns.values()]
        cells = [cell for one in scores for cell in (f"{100 * one['accuracy']:.2f}%", f"{one['images']:,}")]
        table.add_row(entry["run"], f"{entry['data']} ({entry['split']})", *cells)
    return table


def _translations(options: Options, results: list[Result]) -> Table:
    whole = any("documents" in entry for entry in results)
    table = _table("Translation", options)
    names = ["BLEU", "chrF", *(["doc. BLEU", "doc. chrF"] if whole else []), "perplexity", "segments"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for entry in results:
        levels = [entry["segments"], *([entry.get("documents")] if whole else [])]
        cells = [f"{level[name]:.2f}" if level else "–" for level in levels for name in ("bleu", "chrf")]
        table.add_row(*_about(entry), *cells, f"{entry['perplexity']:.4g}", f"{entry['segments']['texts']:,}")
    return table


def _perplexities(options: Options, results: list[Result]) -> Table:
    table = _table("Language model", options)
    for name in ("perplexity", "bits/character", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in results:
        numbers = (f"{entry['perplexity']:.4g}", f"{entry['bits_per_character']:.4f}", f"{entry['tokens']:,}")
        table.add_row(*_about(entry), *numbers)
    return table


def _table(title: str, options: Options) -> Table:
    table = terminal.results_table(title, terminal.SMOKE if options.smoke else None)
    for name in ("run", "data set"):
        table.add_column(name)
    return table


def _about(entry: Result) -> tuple[str, str]:
    direction = " to ".join(dict.fromkeys(entry["languages"]))
    return entry["run"], f"{entry['data']} ({entry['split']}, {direction})"


def _signatures(results: list[Result]) -> list[str]:
    searches = [entry["search"] for entry in results]
    return [
        *(f"BLEU {entry['segments']['bleu_signature']}" for entry in results),
        *(f"chrF {entry['segments']['chrf_signature']}" for entry in results),
        *(f"beam search: {one['beams']} beams, length penalty {one['length_penalty']}" for one in searches),
    ]


def _uneven(results: list[Result]) -> list[str]:
    uneven = [entry for entry in results if entry.get("uneven")]
    return [f"{one['run']}: {translation.uneven_note(one['uneven'], one['stretches'])}" for one in uneven]
