"""text.load: from a name or a path to a corpus."""

from collections.abc import Sequence
from glob import escape
from pathlib import Path

from nomax._files import did_you_mean
from nomax.data.load import Paths, paths_of
from nomax.data.registry import TEXT_SPLITS, TEXTS
from nomax.data.text.corpus import Corpus, is_jsonl, language_of, read_jsonl, read_text_files


def load(
    name_or_paths: Paths,
    split: str = "train",
    *,
    languages: Sequence[str] | None = None,
    root: Path | None = None,
    on_error: str = "raise",
) -> Corpus:
    """Load one split of a corpus: documents of pairs.

    `name_or_paths` is a name (`nomax data list` shows them); a folder with train.jsonl, valid.jsonl and test.jsonl, or
    with train.en, train.es and so on; one JSONL file of documents; or two text files in which line i is the translation
    of line i, as two paths or as "FILE,FILE". Files without splits are a whole corpus: split="train" or "all" gives it.

    `languages` names source and target: ("es", "en") turns bible-en-es around, and train.en with train.es. Only files
    such as a.txt and b.txt, whose names say no language, get theirs from it. `root` is where named sets are kept,
    data.cache_folder() if not given. `on_error="skip"` leaves out pairs of text files of which one side is empty or is
    not UTF-8, instead of raising.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error must be 'raise' or 'skip', not {on_error!r}.")
    wanted = _two(languages)
    given = paths_of(name_or_paths)
    if len(given) == 2:
        _whole(split, ", ".join(given))
        return read_text_files(_file(given[0]), _file(given[1]), wanted, on_error)
    (text,) = given
    if text in TEXTS:
        return _named(text, split, wanted, root)
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder(path, split, wanted, on_error)
    if path.is_file():
        _whole(split, text)
        if path.suffix != ".jsonl" and not is_jsonl(path):
            raise ValueError(_one_of_two(text, path))
        return read_jsonl(path, wanted)
    hint = did_you_mean(text, TEXTS)
    if text.count(",") > 1:
        hint = ". Text files come in twos, FILE,FILE, whose names hold no comma."
    raise FileNotFoundError(
        f"{text!r} is neither a file or folder nor the name of a data set of text{hint} "
        "To see the names: nomax data list"
    )


def has_splits(name_or_paths: Paths) -> bool:
    """Return whether this is a name or a folder, rather than files, which are a whole corpus."""
    first, *second = paths_of(name_or_paths)
    return not second and (first in TEXTS or not Path(first).expanduser().is_file())


def _named(name: str, split: str, languages: tuple[str, str] | None, root: Path | None) -> Corpus:
    entry = TEXTS[name]
    if split not in TEXT_SPLITS:
        raise ValueError(f"split {split!r}: {name} has the splits {', '.join(TEXT_SPLITS)}.")
    if languages and set(languages) != set(entry.languages):
        raise ValueError(f"languages {languages!r}: {name} has {' and '.join(entry.languages)}.")
    folder = entry.prepared_folder(root)
    try:
        corpus = read_jsonl(folder / f"{split}.jsonl", languages or entry.languages)
    except (ValueError, OSError) as error:
        again = f"Remove that folder, then fetch it again: nomax data get {name}."
        raise ValueError(f"the data set in {folder} is damaged: {error} {again}") from error
    return Corpus(corpus.documents, corpus.languages, f"{name} ({split})")


def _folder(path: Path, split: str, languages: tuple[str, str] | None, on_error: str) -> Corpus:
    if split not in TEXT_SPLITS:
        raise ValueError(f"split {split!r}: a folder has the splits {', '.join(TEXT_SPLITS)}.")
    if (path / f"{split}.jsonl").is_file():
        return read_jsonl(path / f"{split}.jsonl", languages)
    files = sorted(file for file in path.glob(f"{split}.*") if file.is_file())
    if languages is not None and files:
        named = {language_of(file, languages): file for file in reversed(files)}  # train.en rather than train.en.txt
        for word in languages:
            if word not in named:
                there = ", ".join(file.suffix[1:] for file in files)
                raise ValueError(f"unknown language mark {word!r}: {path} has {split} in {there}.")
        files = [named[word] for word in languages]
    if len(files) != 2:
        there = ", ".join(file.name for file in files) or "none of these"
        raise FileNotFoundError(
            f"{path} must hold {split}.jsonl, or {split}.SOURCE and {split}.TARGET with two marks of languages (with "
            f"more than two, --languages chooses; in Python, `languages`); it holds {there}."
        )
    return read_text_files(files[0], files[1], languages, on_error)


def _two(languages: Sequence[str] | None) -> tuple[str, str] | None:
    if languages is None:
        return None
    if isinstance(languages, str) or len(languages) != 2 or languages[0] == languages[1]:
        raise ValueError(f'languages is {languages!r}; it must be two different marks, such as ("en", "es").')
    return languages[0], languages[1]


def _one_of_two(text: str, path: Path) -> str:
    """Return the advice for one file of plain text."""
    others = [file for file in path.parent.glob(f"{escape(path.stem)}.*") if file != path and language_of(file)]
    other = text.removesuffix(path.suffix) + others[0].suffix if language_of(path) and len(others) == 1 else "FILE"
    return (
        f"{text} is not JSONL, so it is one side of a translation: name both files, in which line i is the translation "
        f"of line i, as FILE,FILE: {text},{other}"
    )


def _file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{text}: there is no such file.")
    return path


def _whole(split: str, title: str) -> None:
    if split not in ("train", "all"):
        raise ValueError(
            f"split {split!r}: {title} has no splits; it is one corpus, which split='train' or 'all' gives. For "
            f"others, make a folder with {', '.join(f'{name}.jsonl' for name in TEXT_SPLITS)}."
        )
