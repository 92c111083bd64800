"""`nomax train language`: train a causal language model, with any φ, or several side by side."""

from dataclasses import dataclass

from nomax.train import command, configure_text
from nomax.train.text_options import TextOptions
from nomax.train.text_recipes import RECIPES

TITLE = "train language"


@dataclass(frozen=True)
class Options(TextOptions):
    """Train a ReLUFormer without encoder as a language model on one side of a corpus, or on plain text.

    It has the switches, the run folder, the exit codes and the exact resumption of `nomax train translate`. It learns
    from documents of 256 tokens unless --documents says otherwise. Data may also be a text file (with --valid another),
    or a folder with train.txt, valid.txt and test.txt; an empty line ends a document. Afterwards: nomax evaluate RUN
    gives the perplexity on the test split, and nomax generate RUN continues texts.
    """

    documents: int | None = 256
    """Learn from documents cut and joined to so many tokens (128 to 4,096), or, with 0, from single segments."""
    language: str | None = None
    """Which side of the corpus: en, es, …; its first, if not given."""


def defaults(arguments: list[str]) -> Options:
    """The options with the values of the recipe that a command line names, for the φ that is trained by default."""
    shown: Options = configure_text.defaults(Options(), command.recipe(arguments, RECIPES)("language"))
    return shown


def run(options: Options) -> int:
    """Train. See Options for the exit codes."""
    languages = (options.language,) if options.language else None
    return command.train(options, TITLE, lambda: configure_text.jobs(options, "language", languages))
