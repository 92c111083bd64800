"""Under torchrun: trains the toy several times, [[folder, settings, poisoned step], …], and ViTs, [options, …].

Before that, it loads checkpoints of the toy and writes what the ranks then hold, [[folder, settings, file], …].
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict as states
from toy_task import CONFIG, Points

from nomax.console import Console
from nomax.train.console import Bar, Stop
from nomax.train.distributed import world
from nomax.train.loop import Loop, train
from nomax.train.nonfinite import NonFiniteError
from nomax.train.vision.command import Options, run

if __name__ == "__main__":
    torch.set_num_threads(1)
    with world() as here, Stop() as stop:
        for folder, settings, file in json.loads(sys.argv[3]):
            config = replace(CONFIG, **settings)
            loop = Loop(Points(config), config, Path(folder), here)
            loop.resume()
            whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
            held = {
                "model": states.get_model_state_dict(loop.model, options=whole),
                "average": states.get_model_state_dict(loop.average, options=whole),
                "optimiser": states.get_optimizer_state_dict(loop.model, loop.optimiser, options=whole),
            }
            if here.leads:
                torch.save(held, file)
        for folder, settings, poisoned in json.loads(sys.argv[1]):
            config = replace(CONFIG, **settings)
            task = Points(config)
            task.poisoned = poisoned
            bar = Bar("toy", config.steps, Points.unit, Console(quiet=True), show=False)
            try:
                train(task, config, Path(folder), here, stop, bar)
            except NonFiniteError as error:
                if here.leads:
                    Path(folder, "nonfinite.json").write_text(json.dumps(error.report))
        for options in json.loads(sys.argv[2]):
            run(Options(**{**options, "out": Path(options["out"])}))
