"""What `nomax evaluate` does with runs of text: BLEU and chrF of translations, perplexity of language models."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nomax.data.text import Corpus, Document
from nomax.evaluate import translation
from nomax.evaluate.commands import terminal
from nomax.evaluate.runs import TextRun
from nomax.evaluate.translation import Search
from nomax.train import text_data
from nomax.train.progress import perplexity

if TYPE_CHECKING:
    from nomax.evaluate.commands.evaluate import Options

TOKENS = 64  # that count as one of --batch-size


def evaluate(options: "Options", run: TextRun, progress: Progress) -> dict[str, Any]:
    """All that is measured of a run."""
    corpus = _corpus(options, run)
    about: dict[str, Any] = {"run": run.title, "phi": run.model.config.phi, "data": options.data or run.config.data}
    about |= {"split": options.split, "languages": list(corpus.languages)}
    tokens = TOKENS * options.batch_size
    parts = (run.model, run.tokenizer, run.config, corpus)
    report = terminal.advancing(progress, f"{run.title}, likelihood", len(corpus))
    known = translation.likelihood(*parts, tokens, report)
    about |= {"perplexity": perplexity(known.per_token), "nll": known.per_token, "tokens": known.tokens}
    if not run.translates:
        return about | {"bits_per_character": known.bits_per_character}
    examples = len(translation.examples_of(run.config, corpus, run.tokenizer))
    report = terminal.advancing(progress, f"{run.title}, translations", examples)
    how = Search(options.beams, options.length_penalty, tokens)
    found = translation.translate_corpus(*parts, how, report)
    segments, documents = translation.references(corpus)
    about |= {"search": asdict(how), "segments": asdict(translation.quality(found.segments, segments))}
    if run.config.documents:
        whole = asdict(translation.quality(found.documents, documents))
        about |= {"documents": whole, "examples": found.examples, "aligned": found.aligned}
    return about


def show(found: list[dict[str, Any]], smoke: bool, console: Console) -> None:
    """A table of translations, with the signatures of its metrics, and one of language models."""
    translated = [entry for entry in found if "segments" in entry]
    if translated:
        console.print(_translations(translated, smoke))
        for signature in dict.fromkeys(_signatures(translated)):
            console.print(signature, highlight=False, soft_wrap=True)
    for entry in translated:
        if entry.get("aligned", 0) != entry.get("examples", 0):
            console.print(
                f"{entry['run']}: {entry['examples'] - entry['aligned']:,} of {entry['examples']:,} stretches of "
                "documents came back with another number of segments, so that BLEU by segment is low for them.",
                soft_wrap=True,
            )
    if languages := [entry for entry in found if "segments" not in entry]:
        console.print(_languages(languages, smoke))


def _corpus(options: "Options", run: TextRun) -> Corpus:
    config = run.config
    if options.data is None and not run.known:
        raise ValueError(f"{run.name} is a saved model, which does not say its data set; give one with --data.")
    languages = config.languages if run.known else None
    if options.data is None:
        corpus = text_data.of_run(config, options.split)
    else:
        corpus = text_data.load(options.data, options.split, config.task, languages)
    if options.smoke:
        first = corpus.documents[0]
        corpus = Corpus((Document(first.name, first.pairs[:4]),), corpus.languages, corpus.title)
    return corpus


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
        table.add_column(name, overflow="fold")
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
