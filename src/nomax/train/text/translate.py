"""`nomax train translate`: train an encoder-decoder to translate, with any φ, or several side by side."""

from dataclasses import dataclass
from typing import Any

from nomax.train import cli
from nomax.train.text import command
from nomax.train.text.config import RECIPES


@dataclass(frozen=True)
class TrainTranslate(command.TrainText):
    """Train a ReLUFormer to translate sentences or documents, with one φ or with several side by side.

    Stop it whenever you like (Ctrl-C, SIGTERM, even kill -9) and give the same command again: it resumes from the last
    checkpoint, with bitwise the same result. On several GPUs or machines: torchrun --nproc-per-node 8 -m nomax.cli
    train translate ...

    The peers of ReLUFormer: --phi softmax, sparsemax, entmax15, relu (as a drop-in), relu/L, and ReLA as --phi relu
    --joined-norm rela; its factor alone is --penalty 0.

    The run folder has the same files as for `nomax train vit`, and vocabulary.model. Afterwards, nomax evaluate RUN
    gives BLEU (with --split valid if the data has no test split), and nomax translate RUN < in.txt > out.txt
    translates. Exit codes: 0 finished, 1 failed (a non-finite loss, a full disk), 2 wrong options, 130 stopped by
    Ctrl-C and 143 by SIGTERM, both with a checkpoint.
    """

    languages: tuple[str, str] | None = None
    """Source and target, such as --languages es en; by default in the order of the data. File names such as train.en
    give their language; for a.txt,b.txt name both here."""


Options = command.options(TrainTranslate)


def defaults(arguments: list[str]) -> Any:
    """Return the options with the values of the recipe that a command line names, for the φ trained by default."""
    return command.defaults(Options(), cli.named_recipe(arguments, RECIPES)("translate"))


def run(options: Any) -> int:
    """Train. See TrainTranslate for the exit codes."""
    return command.run(options, "translate", options.languages)
