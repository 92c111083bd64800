"""`nomax train language`: train a causal language model, with any φ, or several side by side."""

from dataclasses import dataclass
from typing import Any

from nomax.train import cli
from nomax.train.text import command
from nomax.train.text.config import RECIPES


@dataclass(frozen=True)
class TrainLanguage(command.TrainText):
    """Train a ReLUFormer without encoder as a language model on one side of a corpus, or on plain text.

    Options, run folder, exit codes and exact resume are those of `nomax train translate`. It trains on documents of 256
    tokens unless --documents says otherwise. Data may also be a text file (with another for --valid), or a folder with
    train.txt, valid.txt and test.txt; an empty line ends a document. Afterwards, nomax evaluate RUN gives the
    perplexity on the test split, and nomax generate RUN continues texts.
    """

    documents: int | None = 256
    """Train on documents cut and joined to this many tokens (128 to 4,096), or, with 0, on single segments."""
    language: str | None = None
    """Side of the corpus to learn: en, es, …; by default the first."""


Options = command.options(TrainLanguage, without=("encoder_layers",))


def defaults(arguments: list[str]) -> Any:
    """Return the options with the values of the recipe that a command line names, for the φ trained by default."""
    return command.defaults(Options(), cli.named_recipe(arguments, RECIPES)("language"))


def run(options: Any) -> int:
    """Train. See TrainLanguage for the exit codes."""
    return command.run(options, "language", (options.language,) if options.language else None)
