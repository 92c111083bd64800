"""What is measured of a vision transformer after its training."""

from pathlib import Path
from typing import Any

import numpy as np

from nomax import data
from nomax.data.source import part
from nomax.evaluate import Run as Trained
from nomax.evaluate import classify, fewshot, load, subset
from nomax.evaluate.features import features
from nomax.evaluate.sources import probe_sets
from nomax.study.image_run import ImageRun
from nomax.train.stop import Stop

SHOTS = 10


def measure(run: ImageRun, folder: Path, found: dict[str, Any], device: str, stop: Stop) -> dict[str, Any] | None:
    """All that is measured, by column; None if asked to stop. `found` is what the training said at its end."""
    results = {"accuracy": found["test_accuracy"], "loss": found["test_loss"]}
    if run.subset is None and not run.probes:
        return results
    trained = load(folder, device)
    if run.subset is not None:
        results["subset_accuracy"] = _subset_accuracy(run, trained)
    probes: dict[str, float] = {}
    for name in run.probes:
        if stop.asked:  # the next start does them all: they are short beside the training
            return None
        probes[name.partition("=")[0]] = ten_shot(trained, name, run.probe_images)
    if probes:
        results |= {"probes": probes, "ten_shot": float(np.mean(list(probes.values())))}
    return results


def ten_shot(trained: Trained, name: str, test_images: int = 0) -> float:
    """The ten-shot accuracy on a data set, the mean over big_vision's three choices of the shots."""
    ((train, test),) = probe_sets([name]).values()
    places = fewshot.needed(train.labels, (SHOTS,), fewshot.SEEDS)
    train_x, _ = features(trained.model, part(train, places))
    test_x, test_y = features(trained.model, _some(test, test_images))
    found = fewshot.accuracies(train_x, train.labels, test_x, test_y, (SHOTS,), fewshot.SEEDS, places=places)
    return float(found.mean())


def _subset_accuracy(run: ImageRun, trained: Trained) -> float | None:
    config = run.config
    test = data.load(config.data, "test", on_error=config.on_error, held_out=config.held_out)
    source = _some(test, config.test_images)
    labels = subset.named(run.subset or "", source.classes)
    score = classify(trained.model, source, trained.transform, labels)[1]
    return score.accuracy if score is not None and score.images else None


def _some(source: data.Source, number: int) -> data.Source:
    """So many images of a source, spread evenly; all of them for 0."""
    if not 0 < number < len(source):
        return source
    return part(source, np.linspace(0, len(source) - 1, number).astype(np.int64))
