# alias until the importers have moved: nomax.evaluate.commands.terminal -> nomax.evaluate.terminal
from nomax.evaluate.terminal import EXPECTED
from nomax.evaluate.terminal import print_error as tell

__all__ = ["EXPECTED", "tell"]
