"""`nomax train translate`: train an encoder-decoder to translate, with any φ, or several side by side."""

from dataclasses import dataclass
from typing import Any

from nomax.train import cli
from nomax.train.text import command
from nomax.train.text.config import RECIPES


@dataclass(frozen=True)
class TrainTranslate(command.TrainText):
    """Train a ReLUFormer to translate sentences or documents, with one φ or with several side by side.

    Stop it whenever you like (Ctrl-C, SIGTERM, even kill -9) and give the same command again: it goes on from the last
    checkpoint, to the same result to the bit. On several GPUs or machines: torchrun --nproc-per-node 8 -m nomax.cli
    train translate ...

    The peers of ReLUFormer: --phi softmax, sparsemax, entmax15, relu (put in directly), relu/L, and ReLA as --phi relu
    --joined-norm rela; its factor alone is --penalty 0.

    The run folder gets what one of `nomax train vit` has, and vocabulary.model. Afterwards: nomax evaluate RUN gives
    BLEU (with --split valid where the data has no test split), nomax translate RUN < in.txt > out.txt translates. Exit
    codes: 0 finished, 1 failed (a loss that is not finite, a full disk), 2 wrong options, 130 stopped by Ctrl-C and 143
    by SIGTERM, both of them with a checkpoint.
    """

    languages: tuple[str, str] | None = None
    """Source and target, such as --languages es en; in the order that the data has, if not given. Names of files such
    as train.en say theirs; --languages says those of a.txt,b.txt."""


Options = command.options(TrainTranslate)


def defaults(arguments: list[str]) -> Any:
    """Return the options with the values of the recipe that a command line names, for the φ trained by default."""
    return command.defaults(Options(), cli.named_recipe(arguments, RECIPES)("translate"))


def run(options: Any) -> int:
    """Train. See TrainTranslate for the exit codes."""
    return command.run(options, "translate", options.languages)
