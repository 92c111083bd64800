"""A task small enough to check the training loop by hand: two classes of points, a model of two layers."""

from pathlib import Path

import torch
from torch import nn

from nomax.console import Console
from nomax.train.config import LoopConfig
from nomax.train.console import Bar, Stop
from nomax.train.distributed import World
from nomax.train.loop import Loop, Outcome, train

HERE = World(torch.device("cpu"))
CONFIG = LoopConfig(steps=12, batch_size=8, lr=0.05, warmup=2, checkpoint_every=5, evaluate_every=4, threads=1)


class Net(nn.Module):
    """Linear → LayerNorm → relu → Linear, the middle in a list as the blocks of a transformer are."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.LayerNorm(4)])
        self.scale = nn.Parameter(torch.ones(4))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dropout(torch.relu(x * self.scale)))


class Points:
    """Points with a label, each batch a function of its step."""

    unit = "points"

    def __init__(self, config=CONFIG, dropout=0.0):
        self.config = config
        torch.manual_seed(config.seed)
        self.model = Net(dropout)
        self.poisoned = None  # the step whose batch shall hold a NaN

    def batch(self, step):
        generator = torch.Generator().manual_seed(1000 * self.config.seed + step)
        points = torch.randn(self.config.batch_size, 3, generator=generator)
        labels = (points.sum(-1) > 0).long()
        if step == self.poisoned:
            points[6, 1] = float("nan")  # of two ranks, the second one has it
        return points, labels

    def batches(self, start, world):
        step = start
        while True:
            points, labels = self.batch(step)
            share = len(points) // world.size
            mine = slice(world.rank * share, (world.rank + 1) * share)
            yield points[mine], labels[mine]
            step += 1

    def size(self, batch):
        return len(batch[0])

    def split(self, batch, parts):
        return zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True)

    def measure(self, model, batch):
        logits = model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1], reduction="sum")
        return {"loss": loss, "accuracy": (logits.argmax(-1) == batch[1]).sum()}

    def evaluation(self, world):
        points, labels = self.batch(10_000)
        yield points[world.rank :: world.size], labels[world.rank :: world.size]

    def observe(self, model, batch, step, folder):
        pass

    def describe(self, step):
        return {"points": [step * self.config.batch_size + i for i in range(self.config.batch_size)]}


def run(folder: Path, task: Points | None = None, config: LoopConfig = CONFIG, stop: Stop | None = None) -> Outcome:
    """Train the toy, quietly."""
    task = task or Points(config)
    return train(task, config, folder, HERE, stop or Stop(), _silent(config))[0]


def loop(folder: Path, task: Points | None = None, config: LoopConfig = CONFIG) -> Loop:
    """A loop at its first step."""
    return Loop(task or Points(config), config, folder, HERE)


def _silent(config: LoopConfig) -> Bar:
    return Bar("toy", config.steps, Points.unit, Console(quiet=True), show=False)
