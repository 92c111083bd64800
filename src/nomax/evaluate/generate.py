"""`nomax generate`: continue texts with a language model."""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro

from nomax.data.text.tokenizer import SEPARATOR
from nomax.evaluate import terminal
from nomax.evaluate.runs import TrainedTextModel, load_text
from nomax.models.decoding import COLDEST, stream

USUAL_TOKENS = 100
LARGEST_PROMPT = 1 << 20  # bytes read from standard input; no model's maximum is near it


@dataclass(frozen=True)
class Options:
    """Continue a text with a language model: nomax generate RUN "In the beginning"

    If there is no prompt, it is read from standard input, unless that is a terminal; then texts begin with nothing. The
    prompt and its continuation are printed, token by token on a terminal, until the model ends the text or --tokens
    are reached. Lines of a prompt are segments of a document; a run of single segments reads them as one. Documents
    are separated by an empty line.

    The same seed gives the same text. Text number i of --count has the seed --seed + i.
    """

    run: terminal.OneRun
    """A run folder that `nomax train language` wrote, or a saved model."""
    prompt: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[PROMPT]", help_behavior_hint="(default: standard input)")]
    ] = ()
    """Beginning of the text."""
    tokens: int | None = None
    """Most tokens to add; if not given, 100, or fewer if the model's maximum is near."""
    temperature: float = 1.0
    """Below 1, likely tokens become likelier; 0 always takes the likeliest."""
    top_k: int | None = None
    """Choose only among this many likeliest tokens."""
    top_p: float | None = None
    """Choose only among the likeliest tokens that together have this probability, such as 0.9."""
    seed: int = 0
    """Another seed gives another text."""
    count: int = 1
    """Number of texts."""
    device: terminal.Device = None


def run(options: Options) -> int:
    """Print the texts."""
    _check(options)
    trained = load_text(options.run, options.device)
    if trained.translates:
        raise ValueError(
            f"{options.run} is a translation model, which does not continue texts. To translate: "
            f"nomax translate {shlex.quote(options.run)} < in.txt"
        )
    prompt = _tokens(_prompt(options), trained)
    most = _most_tokens(options, len(prompt), trained)
    try:
        for number in range(options.count):
            if number and _of_documents(trained):
                _write("\n")
            for piece in _text(options, trained, prompt, most, options.seed + number):
                _write(piece)
            _write("\n")
    except FloatingPointError as error:
        raise FloatingPointError(f"{options.run}: {error}") from error
    return 0


def _check(options: Options) -> None:
    if sys.stdout is None:
        raise ValueError("standard output is needed, and it is closed.")
    for name in ("tokens", "top_k", "count"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1.")
    if not (options.temperature == 0 or COLDEST <= options.temperature <= 1 / COLDEST):
        raise ValueError(
            f"--temperature {options.temperature:g} must be 0, or from {COLDEST:g} to {1 / COLDEST:g}; 1 is usual."
        )
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ValueError(f"--top-p {options.top_p:g} must be more than 0 and at most 1.")
    if not 0 <= options.seed <= options.seed + options.count < 1 << 63:
        raise ValueError(f"--seed {options.seed} must be from 0 to 2^63, with --count added.")


def _prompt(options: Options) -> str:
    if options.prompt or sys.stdin is None or sys.stdin.isatty():
        return " ".join(options.prompt)
    read = sys.stdin.buffer.read(LARGEST_PROMPT + 1)
    if len(read) > LARGEST_PROMPT:
        raise ValueError(f"the prompt on standard input has more than {LARGEST_PROMPT:,} bytes.")
    try:
        return read.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt on standard input is not UTF-8: byte {error.start + 1:,} is 0x{read[error.start]:02x}. "
            "Convert it, with iconv for example."
        ) from error


def _tokens(prompt: str, trained: TrainedTextModel) -> list[int]:
    """Encode the prompt like a text of the training data: single spaces, and a separator between segments."""
    lines = [" ".join(line.split()) for line in (prompt.splitlines() if _of_documents(trained) else [prompt])]
    tokens: list[int] = []
    for number, line in enumerate(line for line in lines if line):
        tokens += [*([SEPARATOR] if number else []), *trained.tokenizer.encode(line)]
    return tokens


def _most_tokens(options: Options, prompt: int, trained: TrainedTextModel) -> int:
    """Return the most tokens to add."""
    longest = trained.model.config.max_length
    room = longest - prompt
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt:,} tokens, and {options.run} reads at most {longest:,}: there is no room to go "
            "on. Shorten it."
        )
    if options.tokens is not None and options.tokens > room:
        raise ValueError(
            f"--tokens {options.tokens:,} must be at most {room:,}: {options.run} has texts of at most {longest:,} "
            f"tokens, and the prompt has {prompt:,}."
        )
    return options.tokens or min(USUAL_TOKENS, room)


def _text(options: Options, trained: TrainedTextModel, prompt: list[int], most: int, seed: int) -> Iterator[str]:
    """Yield the text in pieces: on a terminal one per token, as far as later tokens cannot change it."""
    tokens, shown = list(prompt), ""
    begun = torch.tensor([prompt], dtype=torch.int64, device=trained.model.embedding.weight.device)
    how: dict[str, Any] = {"top_k": options.top_k, "top_p": options.top_p, "seed": seed}
    for token in stream(trained.model, begun, most, temperature=options.temperature, **how):
        tokens.append(int(token))
        if sys.stdout.isatty():
            # A character may take several tokens, and decodes to replacement characters until all of them are there.
            text = _decoded(tokens, trained).rstrip("\ufffd")
            if text.startswith(shown):
                yield text[len(shown) :]
                shown = text
    yield _decoded(tokens, trained).removeprefix(shown)


def _decoded(tokens: list[int], trained: TrainedTextModel) -> str:
    return "\n".join(trained.tokenizer.segments(tokens)) if _of_documents(trained) else trained.tokenizer.decode(tokens)


def _of_documents(trained: TrainedTextModel) -> bool:
    """Return whether texts have several segments; a saved model does not say, and is assumed to have them."""
    return trained.config.documents or not trained.known


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()
