"""How far the hardest model we know comes back with another φ: TabPFN 0.1, by how many of its layers are converted.

    nomax data get tabpfn
    python tools/recover_tabpfn.py --out results/convert/tabpfn

TabPFN classifies the rows of a small table in one forward pass: rows with labels are keys, all rows are queries. Its
scores are peaked (standard deviations of 5 to 13), which pointwise weights imitate worst. Here it is converted by
nomax.convert, calibrated by nomax.calibrate and distilled by nomax.distil on made-up tables, and measured on four real
ones. Layers are converted in the order of how little each of them harms, when it is the only one.

OUT/tabpfn.json gets every result as soon as it is there, so the same command goes on after a kill, and processes can
share the work, each with a --phi of its own. OUT/tabpfn.md has the table, OUT/tabpfn.svg the figure.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor, nn

import nomax
from nomax import _figures, _files
from nomax.console import Console
from nomax.data.registry import cache_folder
from nomax.train.console import Bar
from nomax.train.distil.distillation import DistilConfig

WIDTH, HEADS, HIDDEN, LAYERS = 512, 4, 1024, 12
FEATURES, CLASSES = 100, 10  # the most that the model takes
# Real tables of scikit-learn: rows to learn from, and rows to test on. Half of them, or what the model is made for.
TABLES = {"breast_cancer": (284, 285), "wine": (89, 89), "iris": (75, 75), "digits": (500, 250)}
SPLITS = 2
TRAINING, VALIDATION, CALIBRATION, SPLIT = range(4)  # what random numbers are for: no two purposes share them
LABELLED, UNLABELLED = (24, 448), 48  # rows of a made-up table with labels, and rows that are asked about
CALIBRATED_ON = (400, 64)  # rows with labels of the tables for calibration
ORDERED_BY = "relu/L"  # the φ with which layers are put in order


@dataclass(frozen=True)
class Options:
    """Convert, calibrate and distil TabPFN with several φ and numbers of layers, and write what comes of it."""

    out: Path = Path("results/convert/tabpfn")
    """The folder of the results; those that are there already are not computed again."""
    phi: tuple[str, ...] = ("relu/L", "relu2/L", "relu(x-4)", "sigmoid(x-log L)")
    """The φ to convert to. relu(x-4) is a threshold: each key counts by itself, however many there are."""
    layers: tuple[int, ...] = (1, 3, 6, 12)
    """How many layers to convert."""
    only_calibrate: bool = False
    """Leave the distillation, which takes most of the time, to another call."""
    steps: int = 300
    """Steps of distillation."""
    lr: float = 1e-4
    """Their peak learning rate."""
    rows: int = 512
    """Rows of the tables in a step, all together."""
    validation: int = 2
    """Batches of made-up tables, other than those of the training, by which layers are ordered."""
    seed: int = 0
    """Of everything that is drawn."""
    threads: int = 1
    """Threads of the CPU."""
    smoke: bool = False
    """Take one φ, one layer and two steps, only to check that it works."""


class Layer(nn.Module):
    """Attention to the rows with labels, then a feed-forward part, each added to the rows and then normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, rows: Tensor, labelled: int) -> Tensor:
        keys = rows[:, :labelled]
        rows = self.norm1(rows + self.self_attn(rows, keys, keys, need_weights=False)[0])
        return self.norm2(rows + self.linear2(F.gelu(self.linear1(rows))))


class TabPFN(nn.Module):
    """TabPFN 0.1, with the names of its checkpoint: logits of the rows without labels [B, rest, 10].

    features are [B, rows, 100], as `prepared` returns them; labels are those of the first rows, [B, labelled].
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.y_encoder = nn.Linear(FEATURES, WIDTH), nn.Linear(1, WIDTH)
        self.transformer_encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(LAYERS))})
        self.decoder = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        labelled = labels.shape[1]
        rows = self.encoder(features)
        rows = torch.cat([rows[:, :labelled] + self.y_encoder(labels[..., None].float()), rows[:, labelled:]], 1)
        for layer in self.transformer_encoder["layers"]:
            rows = layer(rows, labelled)
        return self.decoder(rows[:, labelled:])


def load() -> TabPFN:
    """Load the model that `nomax data get tabpfn` has fetched."""
    path = cache_folder() / "tabpfn" / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: fetch it with nomax data get tabpfn.")
    weights = {name: x for name, x in load_file(path).items() if not name.startswith("criterion.")}
    model = TabPFN()
    model.load_state_dict(weights)
    return model.eval()


def prepared(table: np.ndarray[Any, Any], labelled: int) -> Tensor:
    """Return the features [rows, 100] of a table: without constant columns, normalised by the rows with labels.

    Fewer columns are made larger, so that the sum over all of them is of about the same size.
    """
    columns = torch.as_tensor(table, dtype=torch.float32)
    columns = columns[:, (columns[:labelled] != columns[:1]).any(0)]
    mean, deviation = columns[:labelled].mean(0), columns[:labelled].std(0)
    normal = ((columns - mean) / (deviation + 1e-6)).clamp(-100, 100) * FEATURES / columns.shape[1]
    return F.pad(normal, (0, FEATURES - normal.shape[1]))


@dataclass(frozen=True)
class Batch:
    """Tables of one size: features [B, rows, 100], labels of the first rows, those of the others, and their classes."""

    features: Tensor
    labels: Tensor
    wanted: Tensor
    classes: Tensor  # [B], how many


def called(model: nn.Module, batch: Batch) -> Tensor:
    """Return logits, with classes that a table does not have far below the others."""
    logits: Tensor = model(batch.features, batch.labels).float()
    return logits.masked_fill(torch.arange(CLASSES) >= batch.classes[:, None, None], -1e4)


def real(name: str) -> Batch:
    """Return a table of scikit-learn, split in several ways."""
    from sklearn import datasets

    table, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    known, asked = TABLES[name]
    parts = []
    for split in range(SPLITS):
        chosen = np.random.default_rng((SPLIT, split)).permutation(len(table))[: known + asked]
        parts.append((prepared(table[chosen], known), torch.as_tensor(labels[chosen])))
    features, every = (torch.stack(list(each)) for each in zip(*parts, strict=True))
    return Batch(features, every[:, :known], every[:, known:], torch.full((SPLITS,), int(labels.max()) + 1))


def made_up(labelled: int, *address: int) -> tuple[Tensor, Tensor, int]:
    """Return a made-up table of a random structural model, its labels and the number of its classes.

    Causes go through a random network, noise is added to every node, and some nodes are observed: these are the
    columns. One more node, cut at random places, is the class, and the names of the classes are shuffled.
    """
    draw = np.random.default_rng(address)
    rows = labelled + UNLABELLED
    columns = int(np.exp(draw.uniform(np.log(3), np.log(64))))
    classes = int(draw.integers(2, CLASSES + 1))
    width = max(int(np.exp(draw.uniform(np.log(4), np.log(48)))), 4)
    nodes = [draw.normal(size=(rows, width))]
    shape = (np.tanh, lambda x: np.maximum(x, 0), np.abs, np.sin)[draw.integers(4)]
    for _ in range(int(draw.integers(1, 4))):
        sparse = draw.random((width, width)) < draw.uniform(0.1, 1)
        weights = draw.normal(size=(width, width)) * sparse / np.sqrt(max(sparse.mean() * width, 1))
        noise = draw.normal(size=(rows, width)) * np.exp(draw.uniform(np.log(0.01), np.log(0.5)))
        nodes.append(shape(nodes[-1] @ weights * np.exp(draw.uniform(0, 1))) + noise)
    every = np.concatenate(nodes, 1)
    target = every[:, -1 - int(draw.integers(width))]
    # A column may show a node that others show too, as measurements of one thing do.
    observed = every[:, draw.integers(every.shape[1], size=columns)] + 0.05 * draw.normal(size=(rows, columns))
    cuts = np.sort(draw.choice(target[:labelled], classes - 1, replace=False))
    labels = draw.permutation(classes)[np.searchsorted(cuts, target)]
    return prepared(observed, labelled), torch.as_tensor(labels), classes


def made_up_batch(rows: int, *address: int, labelled: int | None = None) -> Batch:
    """Return about so many rows of made-up tables, all with the same number of labels, by default a random one."""
    draw = np.random.default_rng((*address, 0))
    labelled = labelled or int(np.exp(draw.uniform(*np.log(LABELLED))))
    tables = [made_up(labelled, *address, 1 + i) for i in range(max(rows // (labelled + UNLABELLED), 1))]
    features, labels, classes = zip(*tables, strict=True)
    every = torch.stack(labels)
    return Batch(torch.stack(features), every[:, :labelled], every[:, labelled:], torch.tensor(classes))


def divergence(output: Tensor, target: Tensor, batch: Any = None) -> Tensor:
    """Return how far the student's probabilities are from the teacher's, per row."""
    logs = output.flatten(0, 1).log_softmax(-1), target.flatten(0, 1).log_softmax(-1)
    return F.kl_div(*logs, reduction="batchmean", log_target=True)


class Study:
    """The original, the tables, and what is known so far."""

    def __init__(self, options: Options, console: Console) -> None:
        self.options, self.console = options, console
        self.path = options.out / "tabpfn.json"
        which = ("out", "threads", "phi", "layers", "only_calibrate")  # where, how and which, but not what
        self.settings = {name: value for name, value in asdict(options).items() if name not in which}
        options.out.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(options.out / ".lock")
        if self.known()["settings"] != self.settings:
            raise ValueError(f"{self.path} has results of other settings: choose another --out.")
        self.original = load().requires_grad_(False)
        self.real = {name: real(name) for name in TABLES}
        self.validation = [made_up_batch(options.rows, options.seed, VALIDATION, i) for i in range(options.validation)]
        self.calibration = [
            made_up_batch(options.rows, options.seed, CALIBRATION, i, labelled=labelled)
            for i, labelled in enumerate(CALIBRATED_ON)
        ]
        with torch.no_grad():
            self.targets = [called(self.original, batch) for batch in self.validation]

    def known(self) -> dict[str, Any]:
        """Return all results so far, those of other processes too."""
        if not self.path.exists():
            return {"settings": self.settings, "nomax": nomax.__version__, "harm": {}, "runs": {}}
        return dict(_files.read_json(self.path, f"Remove {self.path} to begin again."))

    def keep(self, group: str, name: str, content: Any) -> None:
        """Add a result, and write the table and the figure of what is there."""
        with self.lock:
            result = self.known()
            result.setdefault(group, {})[name] = content
            _files.write_json(self.path, result)
            _files.write(self.options.out / "tabpfn.md", table(result))
            if result["runs"]:
                _files.write(self.options.out / "tabpfn.svg", figure(result))

    def run(self) -> None:
        """Do what is not done yet."""
        if "measured" not in self.known().get("original", {}):
            self.keep("original", "measured", self.measured(self.original))
        order = self.layers_by_harm()
        wanted = [(phi, number) for phi in self.options.phi for number in self.options.layers]
        for stage in (self.calibrated, self.distilled)[: 1 if self.options.only_calibrate else 2]:
            for phi, number in wanted:
                name = f"{phi}, {number}"
                run = self.known()["runs"].get(name, {"layers": sorted(order[:number]), "stages": {}})
                if stage.__name__ not in run["stages"]:
                    self.console.print(f"{phi}, {number} of {LAYERS} layers, {stage.__name__}")
                    begun = time.monotonic()
                    stage(run, self.converted(phi, run["layers"]))
                    run["seconds"] = round(run.get("seconds", 0) + time.monotonic() - begun, 1)
                    self.keep("runs", name, run)

    def layers_by_harm(self) -> list[int]:
        """Order the layers by the divergence that each brings when it is the only one with φ, calibrated."""
        for layer in range(LAYERS):
            if str(layer) not in self.known()["harm"]:
                model = self.converted(ORDERED_BY, [layer])
                nomax.calibrate(model, self.calibration, call=called)
                self.keep("harm", str(layer), self.error(model))
        harm = self.known()["harm"]
        return sorted(range(LAYERS), key=lambda layer: harm[str(layer)])

    def calibrated(self, run: dict[str, Any], model: TabPFN) -> None:
        """Calibrate a converted model, and measure it."""
        fits = nomax.calibrate(model, self.calibration, call=called)
        numbers = {fit.name: {part: getattr(fit, part).tolist() for part in ("gain", "shift", "error")} for fit in fits}
        run["calibration"] = numbers
        run["stages"]["calibrated"] = self.measured(model)

    def distilled(self, run: dict[str, Any], model: TabPFN) -> None:
        """Distil a converted model, from its calibration on, and measure it."""
        for name, fit in run["calibration"].items():
            layer: Any = model.get_submodule(name)
            layer.learn(torch.tensor(fit["gain"]), torch.tensor(fit["shift"]))
        config = DistilConfig(steps=self.options.steps, lr=self.options.lr, warmup=10)
        with Bar("distilling", config.steps, "rows", self.console) as bar:
            history = nomax.distil(
                model,
                self.original,
                self.training(),
                config,
                output_loss=divergence,
                call=called,
                report=lambda step: bar.update(step.step, {"loss": step.loss, "rows": step.positions}),
            )
        run["losses"] = [round(step.output, 5) for step in history]
        run["rows"] = history[-1].positions
        run["stages"]["distilled"] = self.measured(model)

    def converted(self, phi: str, layers: Sequence[int]) -> TabPFN:
        model = copy.deepcopy(self.original).requires_grad_(True)
        nomax.convert(model, phi, layers=list(layers), inputs=(torch.randn(1, 6, FEATURES), torch.zeros(1, 4)))
        return model

    def training(self) -> Iterator[Batch]:
        step = 0
        while True:
            yield made_up_batch(self.options.rows, self.options.seed, TRAINING, step)
            step += 1

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """Return the divergence from the original on made-up tables."""
        pairs = zip(self.validation, self.targets, strict=True)
        return float(torch.stack([divergence(called(model, batch), target) for batch, target in pairs]).mean())

    @torch.no_grad()
    def measured(self, model: nn.Module) -> dict[str, float]:
        """Return the accuracy on each real table, their mean, and the divergence on made-up ones."""
        model.eval()
        scores = {
            name: float((called(model, batch).argmax(-1) == batch.wanted).double().mean())
            for name, batch in self.real.items()
        }
        return {**scores, "mean": sum(scores.values()) / len(scores), "divergence": self.error(model)}


def runs(result: dict[str, Any]) -> list[tuple[str, int, dict[str, Any]]]:
    """Return each run with its φ and its number of layers, in the order of a table."""
    split = [(*name.rpartition(", ")[::2], run) for name, run in result["runs"].items()]
    usual = {phi: place for place, phi in enumerate(Options.phi)}
    every = [(phi, int(number), run) for phi, number, run in split]
    return sorted(every, key=lambda each: (usual.get(each[0], len(usual)), each[0], each[1]))


def table(result: dict[str, Any]) -> str:
    """Return all accuracies, and the divergence on made-up tables, as a table in Markdown."""
    titles = [*TABLES, "mean", "divergence"]
    lines = ["| φ | layers | | " + " | ".join(title.replace("_", " ") for title in titles) + " |"]
    lines.append("| --- | ---: | --- |" + " ---: |" * len(titles))

    def add(phi: str, layers: int, stage: str, measured: dict[str, float]) -> None:
        cells = " | ".join(f"{measured[title]:{'.3f' if title == 'divergence' else '.1%'}}" for title in titles)
        lines.append(f"| {phi} | {layers} | {stage} | {cells} |")

    add("softmax", 0, "original", result["original"]["measured"])
    for phi, number, run in runs(result):
        for stage, measured in run["stages"].items():
            add(phi, number, stage, measured)
    return "<!-- Written by tools/recover_tabpfn.py -->\n\n" + "\n".join(lines) + "\n"


def figure(result: dict[str, Any]) -> bytes:
    """Draw the mean accuracy over the number of converted layers: a line for each φ, dotted before distillation."""
    matplotlib = _figures.require()
    from matplotlib.figure import Figure

    start = (0, 100 * result["original"]["measured"]["mean"])
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for phi, number, run in runs(result):
        for stage, measured in run["stages"].items():
            lines.setdefault((phi, stage), [start]).append((number, 100 * measured["mean"]))
    markers = dict(zip(dict.fromkeys(phi for phi, _ in lines), _figures.MARKERS, strict=False))
    with matplotlib.rc_context(_figures.STYLE):
        drawing = Figure(figsize=(6.4, 4), layout="constrained")
        axes = drawing.subplots()
        for (phi, stage), points in lines.items():
            axes.plot(
                *zip(*points, strict=True),
                linestyle="-" if stage == "distilled" else ":",
                marker=markers[phi],
                color=_figures.colour_of(phi).light,
                label=f"{phi}, {stage}",
            )
        axes.set_xlabel(f"converted layers, of {LAYERS}")
        axes.set_ylabel("accuracy in %, mean of four tables")
        axes.legend(fontsize=7.5, frameon=False)
        story = [f"{phi}, {stage}: " + ", ".join(f"{n}: {y:.1f} %" for n, y in p) for (phi, stage), p in lines.items()]
        return _figures.rendered(drawing, ".svg", "TabPFN by converted layers", "; ".join(story))


def main() -> None:
    """Run what the command line asks for."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(options.threads)
    if options.smoke:
        options = replace(options, phi=options.phi[:1], layers=(1,), steps=2, rows=96, validation=1)
    study = Study(options, Console())
    study.run()
    study.console.print(table(study.known()))


if __name__ == "__main__":
    main()
