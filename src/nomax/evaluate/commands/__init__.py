# alias until the importers have moved: nomax.evaluate.commands.terminal -> nomax.evaluate.terminal
