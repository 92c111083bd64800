"""What `nomax evaluate` does with runs of text: BLEU and chrF of translations, perplexity of language models."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD

from nomax.console import Console, Progress, Table
from nomax.data.text import Corpus, Document
from nomax.evaluate import translation
from nomax.evaluate.commands import terminal
from nomax.evaluate.runs import TextRun
from nomax.evaluate.translator import Search
from nomax.models.search import LARGEST_PENALTY
from nomax.train import text_data
from nomax.train.progress import perplexity

if TYPE_CHECKING:
    from nomax.evaluate.commands import translate
    from nomax.evaluate.commands.evaluate import Options

TOKENS = 64  # that count as one of --batch-size


def search(options: "Options | translate.Options") -> Search:
    """How translations are searched for; a ValueError names the options that cannot be served."""
    if options.beams < 1 or options.batch_size < 1 or not 0 <= options.length_penalty <= LARGEST_PENALTY:
        raise ValueError(
            f"--beams {options.beams} and --batch-size {options.batch_size} must be at least 1, --length-penalty "
            f"{options.length_penalty} from 0 to {LARGEST_PENALTY}."
        )
    return Search(options.beams, options.length_penalty, TOKENS * options.batch_size)


def evaluate(options: "Options", run: TextRun, progress: Progress) -> dict[str, Any]:
    """All that is measured of a run."""
    how = search(options)
    corpus, split = _corpus(options, run)
    about: dict[str, Any] = {"run": run.title, "phi": run.model.config.phi, "data": options.data or run.config.data}
    about |= {"split": split, "languages": list(corpus.languages)}
    parts = (run.model, run.tokenizer, run.config, corpus)
    known = translation.likelihood(
        *parts, how.tokens, partial(terminal.advancing, progress, f"{run.title}, likelihood")
    )
    about |= {"perplexity": perplexity(known.per_token), "nll": known.per_token, "tokens": known.tokens}
    if not run.translates:
        return about | {"bits_per_character": known.bits_per_character}
    try:
        found = translation.translate_corpus(
            *parts, how, partial(terminal.advancing, progress, f"{run.title}, translations")
        )
    except FloatingPointError as error:
        raise FloatingPointError(f"{run.title}: {error}") from error
    segments, documents = translation.references(corpus)
    about |= {"search": asdict(how), "segments": asdict(translation.quality(found.segments, segments))}
    if run.config.documents:
        whole = asdict(translation.quality(found.documents, documents))
        about |= {"documents": whole, "stretches": found.stretches, "uneven": found.uneven}
    return about


def show(found: list[dict[str, Any]], smoke: bool, console: Console) -> None:
    """A table of translations, with the signatures of its metrics, and one of language models."""
    translated = [entry for entry in found if "segments" in entry]
    if translated:
        console.print(_translations(translated, smoke))
        for signature in dict.fromkeys(_signatures(translated)):
            console.print(signature)
    for entry in translated:
        if entry.get("uneven"):
            console.print(f"{entry['run']}: {uneven(entry['uneven'], entry['stretches'])}")
    if languages := [entry for entry in found if "segments" not in entry]:
        console.print(_languages(languages, smoke))


def uneven(count: int, stretches: int) -> str:
    """What is told about stretches of documents that were translated again."""
    return (
        f"{count:,} of {stretches:,} stretches of documents came back with another number of segments; these were "
        "translated again in smaller parts, down to single segments."
    )


def _corpus(options: "Options", run: TextRun) -> tuple[Corpus, str]:
    """What a run is measured on, and which split that is."""
    config, split = run.config, options.split
    if options.data is None and not run.known:
        raise ValueError(f"{run.name} is a saved model, which does not say its data set; give one with --data.")
    languages = config.languages if run.known else None
    if options.data is not None:
        split = "all" if split == "test" and _is_files(options.data) else split
        corpus = text_data.load(options.data, split, config.task, languages)
    elif split == "test" and _is_files(config.data):
        files = "FILE,FILE" if run.translates else "FILE"
        raise ValueError(f"{run.name} was trained on {config.data}, which has no test split: give --data {files}.")
    else:
        corpus = text_data.of_run(config, split)
    if options.smoke:
        first = corpus.documents[0]
        corpus = Corpus((Document(first.name, first.pairs[:4]),), corpus.languages, corpus.title)
    return corpus, split


def _is_files(data: str) -> bool:
    """Whether these are files, which have no splits, instead of a name or a folder."""
    path = Path(data).expanduser()
    return path.is_file() or ("," in data and not path.exists())


def _translations(found: list[dict[str, Any]], smoke: bool) -> Table:
    whole = any("documents" in entry for entry in found)
    table = _table("Translation", smoke)
    names = ["BLEU", "chrF", *(["doc. BLEU", "doc. chrF"] if whole else []), "perplexity", "segments"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for entry in found:
        levels = [entry["segments"], *([entry.get("documents")] if whole else [])]
        cells = [f"{level[name]:.2f}" if level else "–" for level in levels for name in ("bleu", "chrf")]
        table.add_row(*_about(entry), *cells, f"{entry['perplexity']:.4g}", f"{entry['segments']['texts']:,}")
    return table


def _languages(found: list[dict[str, Any]], smoke: bool) -> Table:
    table = _table("Language model", smoke)
    for name in ("perplexity", "bits/character", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in found:
        numbers = (f"{entry['perplexity']:.4g}", f"{entry['bits_per_character']:.4f}", f"{entry['tokens']:,}")
        table.add_row(*_about(entry), *numbers)
    return table


def _table(title: str, smoke: bool) -> Table:
    caption = "A smoke run: these numbers mean nothing." if smoke else None
    table = Table(box=SIMPLE_HEAD, title=title, caption=caption, title_style="bold", caption_justify="left")
    for name in ("run", "data set"):
        table.add_column(name)
    return table


def _about(entry: dict[str, Any]) -> tuple[str, str]:
    direction = " to ".join(dict.fromkeys(entry["languages"]))
    return entry["run"], f"{entry['data']} ({entry['split']}, {direction})"


def _signatures(found: list[dict[str, Any]]) -> list[str]:
    how = [entry["segments"] for entry in found]
    search = [
        f"beam search: {e['search']['beams']} beams, length penalty {e['search']['length_penalty']}" for e in found
    ]
    return [
        *(f"BLEU {one['bleu_signature']}" for one in how),
        *(f"chrF {one['chrf_signature']}" for one in how),
        *search,
    ]
