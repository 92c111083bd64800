"""`nomax translate`: translate lines or documents from standard input as they come, one line out for each line in."""

import json
import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import tyro
from rich.progress import BarColumn, TimeElapsedColumn, TimeRemainingColumn

from nomax.console import Console, Progress, TextColumn
from nomax.evaluate import terminal
from nomax.evaluate.runs import TrainedTextModel, load_text
from nomax.evaluate.translation import (
    Segment,
    SegmentedDocument,
    TooLongError,
    Translator,
    search_settings,
    uneven_note,
)

BLOCK = 1 << 16  # bytes to read at once, if there are as many
LONGEST_LINE = 1 << 24  # bytes, so that a file that is not text does not fill the memory
LONGEST_DOCUMENT = 10_000  # lines; a longer one is translated in parts, for the same reason


class InputError(ValueError):
    """Some input cannot be translated; `before` holds the output lines of the input before it."""

    before: tuple[str, ...] = ()


def blocks(stream: IO[bytes]) -> Iterator[list[bytes]]:
    """Yield the lines of a stream, as many at a time as have arrived, never waiting for more than one.

    A line that is too long is cut and ends the stream: Stream.take reports it.
    """
    read = getattr(stream, "read1", stream.read)
    rest = b""
    while chunk := read(BLOCK):
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            break
        if whole:
            yield whole
            whole = []
    if rest:
        yield [*whole, rest]


class Stream:
    """Translate blocks of lines. documents: None for single lines; "lines" or "jsonl" as in `nomax translate`.

    split: split what is too long for the model instead of raising InputError. languages: source and target, if known.
    """

    def __init__(
        self,
        translator: Translator,
        documents: str | None = None,
        split: bool = False,
        languages: Sequence[str] | None = None,
    ) -> None:
        self.translator, self.documents, self.split, self.languages = translator, documents, split, languages
        self.lines = 0
        self._open: SegmentedDocument = []  # lines of a document that has not ended yet

    def take(self, block: Iterable[bytes]) -> list[str]:
        """Return the output lines that the next input lines complete."""
        # One for each line (or JSONL document), or for each document with its empty line.
        parsed: list[SegmentedDocument] = []
        names: list[dict[str, Any]] = []
        try:
            for raw in block:
                self.lines += 1
                text = self._decoded(raw)
                if self.documents == "jsonl":
                    if text:
                        about, segments = self._object(text)
                        where = f"line {self.lines}, segment"
                        parsed.append([self._segment(s, f"{where} {n}") for n, s in enumerate(segments, 1)])
                        names.append(about)
                elif self.documents == "lines" and text:
                    self._open.append(self._segment(text, f"line {self.lines}"))
                    if len(self._open) == LONGEST_DOCUMENT:
                        parsed.append(self._open)
                        self._open = []
                else:
                    parsed.append([*self._open, self._segment(text, f"line {self.lines}")])
                    self._open = []
        except InputError as error:
            error.before = tuple(self._written([*parsed, *([self._open] if self._open else [])], names))
            raise
        return self._written(parsed, names)

    def end(self) -> list[str]:
        """Return the rest when the input has ended: a last document without an empty line after it."""
        last, self._open = self._open, []
        return self._written([last], []) if last else []

    def _written(self, parsed: list[SegmentedDocument], names: list[dict[str, Any]]) -> list[str]:
        translated = self.translator.translate(parsed)
        if self.documents != "jsonl":
            return [text for document in translated for text in document]
        both = zip(names, translated, strict=True)
        return [json.dumps({**about, self._mark: texts}, ensure_ascii=False) for about, texts in both]

    @property
    def _mark(self) -> str:
        """The key of the list of translations in JSONL."""
        return self.languages[-1] if self.languages else "translation"

    def _segment(self, text: str, where: str) -> Segment:
        try:
            return self.translator.segment(text, self.split)
        except TooLongError as error:
            raise InputError(f"{where} {error} Split it, or let --split do that.") from error

    def _decoded(self, raw: bytes) -> str:
        if len(raw) > LONGEST_LINE:
            raise InputError(f"line {self.lines} has more than {LONGEST_LINE:,} bytes: is this a text?")
        try:
            text = raw.decode()
            # A byte-order mark is not part of the text.
            return (text.removeprefix("\ufeff") if self.lines == 1 else text).strip()
        except UnicodeDecodeError as error:
            raise InputError(
                f"line {self.lines}, byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8. Convert the text, "
                "with iconv for example."
            ) from error

    def _object(self, text: str) -> tuple[dict[str, Any], list[str]]:
        """Return the segments in a line of JSONL, and everything else it says, which comes first."""
        example = '{"name": "…", "' + (self.languages[0] if self.languages else "segments") + '": ["…", …]}'
        try:
            content = json.loads(text)
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise InputError(f"line {self.lines} has {half} alone, which is only half of a character.") from error
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"line {self.lines} cannot be read as JSON: {error}. It must be such as {example}."
            ) from error
        lists = [key for key, value in content.items() if isinstance(value, list)] if isinstance(content, dict) else []
        mark = self.languages[0] if self.languages else next(iter(lists), "")
        if lists and mark not in lists:
            raise InputError(f"line {self.lines}: unknown language mark {mark!r}; it has {', '.join(lists)}.")
        if not lists or not all(isinstance(segment, str) for segment in content[mark]):
            raise InputError(f"line {self.lines} must be an object with a list of texts, such as {example}.")
        return {key: value for key, value in content.items() if key not in (mark, self._mark)}, content[mark]


@dataclass(frozen=True)
class Options:
    """Translate standard input line by line: nomax translate RUN < in.txt > out.txt

    Each line comes out as one line, in the same order; an empty line stays empty. Lines are translated as they come, so
    the command works in a pipe. Exit codes: 0; 1 for input that cannot be translated (its line is named, and all lines
    before it are written) or output that cannot be written; 2 for wrong options or a broken model; 130 after Ctrl-C;
    141 if the reader closes the pipe.
    """

    run: terminal.OneRun
    """A run folder that `nomax train translate` wrote, or a saved model."""
    text: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="< TEXT", help_behavior_hint="(standard input)")]
    ] = ()
    """Text to translate: a file or a pipe, no argument."""
    documents: Literal["lines", "jsonl"] | None = None
    """Translate whole documents: lines, with an empty line after each document; or JSONL, each line an object with a
    list of segments under the code of the source language, {"en": ["…", …]}, which the translation replaces, {"es":
    ["…", …]}, keeping everything else. For runs of documents."""
    beams: int = 4
    """Number of beams of the search; 1 is greedy, and fastest."""
    length_penalty: float = 0.6
    """0 compares probabilities; larger values favour longer translations."""
    split: bool = False
    """Split what is longer than the model's maximum into sentences, or words if need be, instead of stopping there."""
    batch_size: int = 64
    """Units of 64 tokens that pass through the model at a time."""
    device: terminal.Device = None


def run(options: Options) -> int:
    """Translate standard input. Return 0, or 1 if some of it cannot be translated or written."""
    if options.text:
        raise ValueError(_reads_standard_input(options))
    if sys.stdin is None or sys.stdout is None:
        raise ValueError("standard input and output are both needed, and one of them is closed.")
    stream = _stream(options, load_text(options.run, options.device))
    try:
        _pass(stream)
    except BrokenPipeError:
        raise  # the reader closed the pipe, which is not an error
    except FloatingPointError as error:
        raise FloatingPointError(f"{options.run}: {error}") from error
    except (InputError, OSError) as error:
        return terminal.failed("translate", error)
    translator = stream.translator
    if translator.uneven:
        print(f"nomax translate: {uneven_note(translator.uneven, translator.stretches)}", file=sys.stderr)
    return 0


def _reads_standard_input(options: Options) -> str:
    run, text = shlex.quote(options.run), " ".join(options.text)
    if len(options.text) == 1 and Path(text).is_file():
        return f"it reads standard input: nomax translate {run} < {shlex.quote(text)}"
    return f"it reads standard input, not arguments: echo {shlex.quote(text)} | nomax translate {run}"


def _stream(options: Options, trained: TrainedTextModel) -> Stream:
    if not trained.translates:
        raise ValueError(
            f"{options.run} is a language model: it has no encoder, so it does not translate. To continue a text: "
            f'nomax generate {shlex.quote(options.run)} "How it begins"'
        )
    if options.documents and trained.known and not trained.config.documents:
        raise ValueError(
            f"{options.run} was trained on single segments: leave out --documents, or train with --documents N."
        )
    search = search_settings(options.beams, options.length_penalty, options.batch_size)
    translator = Translator(trained.model, trained.tokenizer, search, whole=options.documents is not None)
    return Stream(translator, options.documents, options.split, trained.config.languages if trained.known else None)


def _pass(stream: Stream) -> None:
    """Write the translations of standard input to standard output."""
    console = Console(stderr=True)
    if sys.stdin.isatty():
        console.print("Type a line to translate; Ctrl-D ends.")
    columns = (BarColumn(), TextColumn("{task.fields[lines]:,} lines"), TimeElapsedColumn(), TimeRemainingColumn())
    shown = console.is_terminal and not sys.stdin.isatty()
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=_bytes(), lines=0)
        try:
            for block in blocks(sys.stdin.buffer):
                _write(stream.take(block))
                progress.update(task, advance=sum(map(len, block)) + len(block), lines=stream.lines)
        except InputError as error:
            _write(error.before)
            raise
        _write(stream.end())


def _write(lines: Iterable[str]) -> None:
    output = sys.stdout.buffer
    try:
        output.writelines(text.encode() + b"\n" for text in lines)
        output.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Whatever is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OSError(f"the translations cannot be written: {error.strerror}.") from error


def _bytes() -> int | None:
    """Return the size of standard input, if it is a file."""
    try:
        status = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
