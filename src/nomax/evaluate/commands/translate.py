"""`nomax translate`: lines in, lines out."""

import os
import stat
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nomax.evaluate.commands import terminal
from nomax.evaluate.commands.evaluate_text import TOKENS
from nomax.evaluate.runs import TextRun, load_text
from nomax.evaluate.stream import InputError, Translator, blocks
from nomax.evaluate.translation import Search


@dataclass(frozen=True)
class Options:
    """Translate what comes in on standard input, line by line: nomax translate RUN < in.txt > out.txt

    Each line comes out as one line, in the same order; an empty line stays empty. Lines are translated as they come, so
    that the command can stand in a pipe. Exit codes: 0, 1 for input that cannot be translated (the line is named, and
    all lines before it are out), 2 for wrong options, 130 after Ctrl-C, 141 when nobody reads on.
    """

    run: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]
    """A run folder that `nomax train translate` wrote, or a saved model."""
    documents: Literal["lines", "jsonl"] | None = None
    """Translate whole documents: lines, with an empty line after each document, or JSONL, each line an object with a
    list of segments and perhaps a name. For runs of documents."""
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
        translator = _translator(options, load_text(options.run, options.device))
    except terminal.EXPECTED as error:
        return terminal.tell("translate", error)
    console = Console(stderr=True)
    if sys.stdin.isatty():
        console.print("Type a line to translate; Ctrl-D ends.", highlight=False)
    columns = (BarColumn(), TextColumn("{task.fields[lines]:,} lines"), TimeElapsedColumn(), TimeRemainingColumn())
    shown = console.is_terminal and not sys.stdin.isatty()
    output = sys.stdout.buffer
    try:
        with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
            task = progress.add_task("", total=_bytes(), lines=0)
            for block in blocks(sys.stdin.buffer):
                output.writelines(text.encode() + b"\n" for text in translator.take(block))
                output.flush()
                progress.update(task, advance=sum(map(len, block)) + len(block), lines=translator.lines)
            output.writelines(text.encode() + b"\n" for text in translator.end())
    except InputError as error:
        output.writelines(text.encode() + b"\n" for text in error.before)
        output.flush()
        print(f"nomax translate: {error}", file=sys.stderr)
        return 1
    if translator.uneven:
        print(
            f"nomax translate: {translator.uneven:,} of {translator.stretches:,} stretches of documents came back with "
            "another number of segments; theirs were translated one by one.",
            file=sys.stderr,
        )
    return 0


def _translator(options: Options, one: TextRun) -> Translator:
    if not one.translates:
        raise ValueError(f"{options.run} is a language model: it has no encoder, so it does not translate.")
    if options.documents and one.known and not one.config.documents:
        raise ValueError(
            f"{options.run} was trained on single segments: leave out --documents, or train with --documents N."
        )
    if options.beams < 1 or options.batch_size < 1 or not options.length_penalty >= 0:
        raise ValueError(
            f"--beams {options.beams} and --batch-size {options.batch_size} must be at least 1, --length-penalty "
            f"{options.length_penalty} at least 0."
        )
    how = Search(options.beams, options.length_penalty, TOKENS * options.batch_size)
    languages = one.config.languages if one.known else None
    return Translator(one.model, one.tokenizer, how, options.documents, options.split, languages)


def _bytes() -> int | None:
    """How much there is to read, if standard input is a file."""
    try:
        status = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
