"""`nomax translate`: lines in, lines out."""

import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.progress import BarColumn, TimeElapsedColumn, TimeRemainingColumn

from nomax.console import Console, Progress, TextColumn
from nomax.evaluate.commands import terminal
from nomax.evaluate.commands.evaluate_text import search, uneven
from nomax.evaluate.runs import TextRun, load_text
from nomax.evaluate.stream import InputError, Stream, blocks
from nomax.evaluate.translator import Translator


@dataclass(frozen=True)
class Options:
    """Translate what comes in on standard input, line by line: nomax translate RUN < in.txt > out.txt

    Each line comes out as one line, in the same order; an empty line stays empty. Lines are translated as they come, so
    that the command can stand in a pipe. Exit codes: 0, 1 for input that cannot be translated (the line is named, and
    all lines before it are out) or output that cannot be written, 2 for wrong options or a broken model, 130 after
    Ctrl-C, 141 when nobody reads on.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """A run folder that `nomax train translate` wrote, or a saved model."""
    documents: Literal["lines", "jsonl"] | None = None
    """Translate whole documents: lines, with an empty line after each document, or JSONL, each line an object with a
    list of segments under the mark of the source language, {"en": ["…", …]}; the translation takes its place, {"es":
    ["…", …]}, and all else stays. For runs of documents."""
    beams: int = 4
    """How many hypotheses of a line are extended; 1 is greedy, and fastest."""
    length_penalty: float = 0.6
    """0 compares probabilities, more favours longer translations."""
    split: bool = False
    """Cut what is longer than the model's maximum into sentences, words if need be, instead of stopping there."""
    batch_size: int = 64
    """How much passes through the model at a time, in 64 tokens."""
    device: str | None = None
    """cpu, cuda, …; if not given, a GPU if there is one."""


def run(options: Options) -> int:
    """Return 0, 1 if some input cannot be translated, or 2 if the options cannot be served."""
    try:
        if sys.stdin is None or sys.stdout is None:
            raise ValueError("standard input and output are both needed, and one of them is closed.")
        stream = _stream(options, load_text(options.run, options.device))
    except terminal.EXPECTED as error:
        return terminal.tell("translate", error)
    try:
        _pass(stream)
    except BrokenPipeError:
        raise  # nobody reads on, which is no error
    except FloatingPointError as error:
        return terminal.tell("translate", FloatingPointError(f"{options.run}: {error}"))
    except (InputError, OSError) as error:
        terminal.tell("translate", error)
        return 1
    translator = stream.translator
    if translator.uneven:
        print(f"nomax translate: {uneven(translator.uneven, translator.stretches)}", file=sys.stderr)
    return 0


def _stream(options: Options, one: TextRun) -> Stream:
    if not one.translates:
        raise ValueError(f"{options.run} is a language model: it has no encoder, so it does not translate.")
    if options.documents and one.known and not one.config.documents:
        raise ValueError(
            f"{options.run} was trained on single segments: leave out --documents, or train with --documents N."
        )
    translator = Translator(one.model, one.tokenizer, search(options), whole=options.documents is not None)
    return Stream(translator, options.documents, options.split, one.config.languages if one.known else None)


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
        # What is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OSError(f"the translations cannot be written: {error.strerror}.") from error


def _bytes() -> int | None:
    """How much there is to read, if standard input is a file."""
    try:
        status = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
