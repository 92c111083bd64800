"""Numbers about a corpus, for `nomax data info`."""

from pathlib import Path
from statistics import median

from rich.text import Text

from nomax.console import Console, Table
from nomax.data.load import paths_of
from nomax.data.registry import TEXT_SPLITS, TEXTS, cache_folder
from nomax.data.source import read_meta
from nomax.data.text.corpus import Corpus, language_of
from nomax.data.text.load import has_splits, load


def is_text(data: str) -> bool:
    """Return whether a name or path is text: a named set, JSONL documents, a pair of files, or a folder of such."""
    path, given = Path(data).expanduser(), paths_of(data)
    pair = len(given) == 2 and any(Path(each).expanduser().is_file() for each in given)
    documents = path.suffix == ".jsonl" and path.is_file()
    return data in TEXTS or pair or documents or any(_in_folder(path, split) for split in TEXT_SPLITS)


def describe_text(data: str, split: str | None, languages: tuple[str, str] | None, console: Console) -> None:
    """Print what is known about a corpus, and a table of its splits."""
    path = Path(data).expanduser()
    if split:
        wanted = [split]
    elif data not in TEXTS and path.is_dir():
        wanted = [name for name in TEXT_SPLITS if _in_folder(path, name)]
    else:
        wanted = list(TEXT_SPLITS) if has_splits(data) else ["all"]
    corpora = {name: load(data, name, languages=languages) for name in wanted}
    for title, text in _facts(data).items():
        console.print(Text.assemble((title, "bold"), f" {text}"))
    console.print(_table(corpora))


def _in_folder(folder: Path, split: str) -> bool:
    """Return whether a folder has JSONL documents or files in two languages for a split."""
    return (folder / f"{split}.jsonl").is_file() or len(
        {language_of(file) for file in folder.glob(f"{split}.*")} - {None}
    ) > 1


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
