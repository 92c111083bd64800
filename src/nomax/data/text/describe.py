"""What a corpus looks like: numbers about it, for `nomax data info`."""

from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from nomax.data.arrays import read_meta
from nomax.data.registry import cache_folder
from nomax.data.text.corpus import Corpus
from nomax.data.text.entries import TEXTS
from nomax.data.text.load import SPLITS, load


def is_text(data: str) -> bool:
    """Whether a name or path is one of text: a named set, JSONL documents, or a folder of such."""
    path = Path(data).expanduser()
    return data in TEXTS or (path.suffix == ".jsonl" and path.is_file()) or (path / "train.jsonl").is_file()


def describe_text(data: str, split: str | None, console: Console) -> None:
    """Print what is known about a corpus, and a table of its splits."""
    if data in TEXTS:
        wanted = [split] if split else list(SPLITS)
    elif Path(data).expanduser().is_dir():
        wanted = (
            [split]
            if split
            else [name for name in SPLITS if Path(data).expanduser().joinpath(f"{name}.jsonl").exists()]
        )
    else:
        wanted = ["all"]
    corpora = {name: load(data, name) for name in wanted}
    for title, text in _facts(data).items():
        console.print(f"[bold]{title}[/bold] {text}", highlight=False, soft_wrap=True)
    console.print(_table(corpora))


def _facts(data: str) -> dict[str, str]:
    if data not in TEXTS:
        return {"data": data}
    entry, folder = TEXTS[data], cache_folder() / data
    meta = read_meta(folder)
    return {
        entry.name: entry.summary,
        "languages": " and ".join(meta["languages"]),
        "licence": entry.licence,
        "from": ", ".join(f"{package['name']} {package['version']}" for package in meta["packages"]),
        "in": str(folder),
        "split": meta["rule"],
        "left out": "; ".join(f"{count:,} {reason}" for reason, count in meta["dropped"].items()) or "nothing",
    }


def _table(corpora: dict[str, Corpus]) -> Table:
    table = Table("", *corpora)
    rows = {name: _numbers(corpus) for name, corpus in corpora.items()}
    for title in next(iter(rows.values())):
        table.add_row(title, *(f"{numbers[title]:,.10g}" for numbers in rows.values()))
    return table


def _numbers(corpus: Corpus) -> dict[str, float]:
    words = [0, 0]
    for pair in corpus.pairs():
        words = [count + len(text.split()) for count, text in zip(words, pair, strict=True)]
    sizes = [sum(len(pair.source.split()) for pair in document.pairs) for document in corpus.documents]
    source, target = corpus.languages
    return {
        "documents": len(corpus.documents),
        "pairs": len(corpus),
        f"words in {source}": words[0],
        f"words in {target}": words[1],
        f"{source} words of the middle document": median(sizes),
        "… of the longest": max(sizes),
    }
