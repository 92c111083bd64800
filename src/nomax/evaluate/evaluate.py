"""`nomax evaluate`: measure accuracy on images, BLEU or perplexity on text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from nomax.console import Console, Progress, Table, counting
from nomax.data.text import Corpus, Document
from nomax.evaluate import terminal, translation
from nomax.evaluate.accuracy import Match, classify, load_subset, match_classes
from nomax.evaluate.runs import TrainedImageModel, TrainedTextModel, load_all, load_any
from nomax.train.console import perplexity

Result = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Measure the accuracy of trained models on test images, BLEU and chrF of translations, perplexity of text.

    With --subset, the prediction is the top class among some columns of the head, without fine-tuning. This is how
    Wortsman et al. report the ImageNet-1k accuracy of ImageNet-21k models: nomax evaluate RUN --data IMAGENET --subset
    imagenet1k. If the data set has all of the head's classes, as with --subset icons, only images of the subset's
    classes count.

    BLEU and chrF are sacrebleu's, printed with their signatures, over single segments; for runs of documents, also over
    whole documents.
    """

    runs: terminal.Runs
    data: str | None = None
    """A name (`nomax data list`), a folder, shards, torchvision:… or hf:…, or text files; if not given, each run's own
    data set."""
    split: str = "test"
    """Split of the data set. Text files have no splits: if --data names files, all of them are used."""
    held_out: float | None = None
    """For --data with images: the share held out as test split, as in `nomax train vit`. A run knows its own."""
    match_classes: Match = "name"
    """Match the classes of --data with the model's by name, where different names are an error, or by order, whatever
    their names."""
    on_error: Literal["raise", "skip"] | None = None
    """Stop at a broken image, or skip it; if not given, as in training for the run's own data, else raise."""
    subset: str | None = None
    """imagenet1k (of 21,843 classes), icons (with at least 30 drawings), or a file: one column or class per line."""
    beams: int = 4
    """For translation: the number of beams; 1 is greedy."""
    length_penalty: float = 0.6
    """For translation: 0 compares probabilities; larger values favour longer translations."""
    batch_size: int = 64
    """Images that pass through the model at a time; for text, 64 times as many tokens."""
    workers: terminal.Workers = 0
    device: terminal.Device = None
    output: terminal.Output = None
    smoke: bool = False
    """Try it on two images of each of the first three classes, or on four segments: shows only that it works."""


def run(options: Options) -> int:
    """Print the results and write them. Return 0, or 1 if they cannot be written."""
    console = Console()
    terminal.check_output(options.output)
    loaded = load_all(options.runs, options.device, load_any)
    with counting(console) as progress:
        images = [_evaluate_images(options, run, progress) for run in loaded if isinstance(run, TrainedImageModel)]
        texts = [_evaluate_text(options, run, progress) for run in loaded if isinstance(run, TrainedTextModel)]
    if images:
        console.print(_accuracies(options, images))
        for note in dict.fromkeys(entry["note"] for entry in images if entry["note"]):
            console.print(note)
    if translations := [entry for entry in texts if "segments" in entry]:
        console.print(_translations(options, translations))
        for note in _notes(translations):
            console.print(note)
    if languages := [entry for entry in texts if "segments" not in entry]:
        console.print(_perplexities(options, languages))
    content = {"smoke": options.smoke, "results": images + texts}
    return terminal.write_results("evaluate", options.output, content, console)


def _evaluate_images(options: Options, trained: TrainedImageModel, progress: Progress) -> Result:
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
    notes = [f"{trained.title}: {note}"] if note else []
    if subset is not None and (absent := subset.absent):
        names = ", ".join(subset.names[place] for place in absent[:5])
        notes.append(
            f"The head has no column for {len(absent)} of the subset's classes ({names}): their images count as wrong."
        )
    about: Result = {"run": trained.title, "phi": trained.model.config.phi, "data": options.data or trained.data}
    about |= {"split": options.split, "subset": options.subset, "note": "\n".join(notes)}
    for name, score in zip(("accuracy", "subset_accuracy"), scores, strict=True):
        about[name] = None if score is None else {"accuracy": score.accuracy, **asdict(score)}
    return about


def _evaluate_text(options: Options, trained: TrainedTextModel, progress: Progress) -> Result:
    search = translation.search_settings(options.beams, options.length_penalty, options.batch_size)
    corpus, split = trained.corpus(options.data, options.split)
    if options.smoke:
        first = corpus.documents[0]
        corpus = Corpus((Document(first.name, first.pairs[:4]),), corpus.languages, corpus.title)
    about: Result = {"run": trained.title, "phi": trained.model.config.phi, "data": options.data or trained.config.data}
    about |= {"split": split, "languages": list(corpus.languages)}
    start = partial(terminal.add_bar, progress, f"{trained.title}, likelihood")
    likelihood = translation.likelihood(trained, corpus, search.tokens, start)
    nll = likelihood.per_token
    about |= {"perplexity": perplexity(nll), "nll": nll, "tokens": likelihood.tokens}
    if not trained.translates:
        return about | {"bits_per_character": likelihood.bits_per_character}
    try:
        start = partial(terminal.add_bar, progress, f"{trained.title}, translations")
        translations = translation.translate_corpus(trained, corpus, search, start)
    except FloatingPointError as error:
        raise FloatingPointError(f"{trained.title}: {error}") from error
    segments, documents = translation.references(corpus)
    about |= {"search": asdict(search), "segments": asdict(translation.quality(translations.segments, segments))}
    if trained.config.documents:
        whole = asdict(translation.quality(translations.documents, documents))
        about |= {"documents": whole, "stretches": translations.stretches, "uneven": translations.uneven}
    return about


def _accuracies(options: Options, results: list[Result]) -> Table:
    columns = {"all classes": "accuracy"} | ({f"among {options.subset}": "subset_accuracy"} if options.subset else {})
    table = _table("Accuracy", options, [heading for name in columns for heading in (name, "images")])
    for entry in results:
        scores = [entry[name] for name in columns.values()]
        cells = [cell for score in scores for cell in (f"{score['accuracy']:.2%}", f"{score['images']:,}")]
        table.add_row(*_about(entry), *cells)
    return table


def _translations(options: Options, results: list[Result]) -> Table:
    whole = any("documents" in entry for entry in results)
    names = ["BLEU", "chrF", *(["doc. BLEU", "doc. chrF"] if whole else []), "perplexity", "segments"]
    table = _table("Translation", options, names)
    for entry in results:
        levels = [entry["segments"], *([entry.get("documents")] if whole else [])]
        cells = [f"{level[name]:.2f}" if level else "–" for level in levels for name in ("bleu", "chrf")]
        table.add_row(*_about(entry), *cells, f"{entry['perplexity']:.4g}", f"{entry['segments']['texts']:,}")
    return table


def _perplexities(options: Options, results: list[Result]) -> Table:
    table = _table("Language model", options, ("perplexity", "bits/character", "tokens"))
    for entry in results:
        numbers = (f"{entry['perplexity']:.4g}", f"{entry['bits_per_character']:.4f}", f"{entry['tokens']:,}")
        table.add_row(*_about(entry), *numbers)
    return table


def _table(title: str, options: Options, numbers: Sequence[str]) -> Table:
    return terminal.results_table(title, terminal.SMOKE if options.smoke else None, ("run", "data set"), numbers)


def _about(entry: Result) -> tuple[str, str]:
    languages = [" to ".join(dict.fromkeys(entry["languages"]))] if "languages" in entry else []
    return entry["run"], f"{entry['data']} ({', '.join([entry['split'], *languages])})"


def _notes(translations: list[Result]) -> list[str]:
    """Return how BLEU, chrF and the translations were computed, each said once, and what came back uneven."""
    notes = [f"BLEU {entry['segments']['bleu_signature']}" for entry in translations]
    notes += [f"chrF {entry['segments']['chrf_signature']}" for entry in translations]
    for entry in translations:
        search = entry["search"]
        notes.append(f"beam search: {search['beams']} beams, length penalty {search['length_penalty']}")
    for entry in translations:
        if entry.get("uneven"):
            notes.append(f"{entry['run']}: {translation.uneven_note(entry['uneven'], entry['stretches'])}")
    return list(dict.fromkeys(notes))
