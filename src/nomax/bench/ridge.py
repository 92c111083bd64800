"""The ridge regressions of `nomax bench probe`: what is to be fitted, and how we and scikit-learn do it."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nomax.evaluate import fewshot

Features = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]


class Work(NamedTuple):
    """What is to be fitted."""

    shots: tuple[int, ...]
    seeds: tuple[int, ...]
    l2: tuple[float, ...]
    predict: bool = True
    """Whether the test images are predicted, too."""


ALL = 10**9  # more shots than there are images: all of them
SWEEP = tuple(2.0**power for power in range(6, 20))
WORKS = {
    "fit": Work((ALL,), (0,), (fewshot.RIDGE,), predict=False),
    "one": Work((ALL,), (0,), (fewshot.RIDGE,)),
    "sweep, fit": Work((ALL,), (0,), SWEEP, predict=False),
    "sweep": Work((ALL,), (0,), SWEEP),
    "protocol": Work(fewshot.SHOTS, fewshot.SEEDS, (fewshot.RIDGE,)),
}


def make_features(images: int, test_images: int, width: int, classes: int) -> Features:
    """Features of overlapping classes, correlated, with offsets and scales, in no order."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(classes, width))
    mixing = generator.normal(size=(width, width)) / width**0.5 + np.eye(width)
    offsets, scales = generator.normal(size=width), generator.uniform(0.2, 5, width)

    def draw(number: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        labels = generator.permutation(np.arange(number) % classes)
        x = (centres[labels] + 6 * generator.normal(size=(number, width))) @ mixing * scales + offsets
        return x.astype(np.float32), labels

    return (*draw(images), *draw(test_images))


def ours(features: Features, work: Work) -> npt.NDArray[np.float64]:
    """Our accuracies, [shots, seeds, l2]; empty without prediction."""
    if work.predict:
        return fewshot.accuracies(*features, work.shots, work.seeds, work.l2)
    train, labels = torch.from_numpy(features[0]), features[1]
    for shots in work.shots:
        for seed in work.seeds:
            chosen = [places[:shots] for places in fewshot.shuffled(labels, seed)]
            rows = torch.from_numpy(np.concatenate(chosen))
            probe = fewshot.fit(train, rows, [len(of_class) for of_class in chosen], work.l2)
            for l2 in work.l2:
                probe.weights(l2)
    return np.empty(0)


def peer(features: Features, work: Work) -> npt.NDArray[np.float64]:
    """The same with scikit-learn: whitened once for each choice of images, fitted for each l2."""
    from sklearn.linear_model import RidgeClassifier

    train, labels, test, expected = features
    found = []
    for shots in work.shots:
        for seed in work.seeds:
            chosen = np.concatenate([places[:shots] for places in fewshot.shuffled(labels, seed)])
            x, targets = train[chosen], labels[chosen]
            mean, deviation = x.mean(0), x.std(0) + np.float32(fewshot.EPSILON)
            x = _whitened(x, mean, deviation)
            shown = _whitened(test, mean, deviation) if work.predict else None
            for l2 in work.l2:
                classifier = RidgeClassifier(alpha=l2, fit_intercept=False).fit(x, targets)
                if work.predict:
                    found.append(classifier.score(shown, expected))
    return np.array(found).reshape((len(work.shots), len(work.seeds), len(work.l2)) if work.predict else 0)


def _whitened(x: Any, mean: Any, deviation: Any) -> npt.NDArray[np.float32]:
    full = np.full((len(x), x.shape[1] + 1), fewshot.CONSTANT, np.float32)
    np.divide(np.subtract(x, mean, out=full[:, :-1]), deviation, out=full[:, :-1])
    return full
