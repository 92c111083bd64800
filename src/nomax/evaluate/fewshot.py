"""The few-shot probe of big_vision: a ridge regression on frozen features, fitted to a few images per class.

X    features of the chosen images, whitened: (x − mean) / (standard deviation + 1e-5), both over the chosen images; and
     a constant feature of 100, so large that the bias is hardly regularised
Y    +1 in the column of the image's class, −1 elsewhere
W    (XᵀX + l2·I)⁻¹ XᵀY; the prediction is the largest column of x·W

Three facts save time without changing a result. Whitened columns sum to zero, so the constant feature is orthogonal to
the others and its weights are known in advance. Scaling moves into W, so neither XᵀX nor the test images are ever
whitened. And all probes of a table predict the same test images, so one product serves many of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from nomax.data import Source
from nomax.data.images.batches import evaluation_batches
from nomax.data.images.transforms import Evaluation
from nomax.data.source import Part, part
from nomax.models import ViT

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
RIDGE = 2.0**10

CONSTANT = 100.0
EPSILON = 1e-5
LARGE = 2**27  # multiply-adds of XᵀX or XXᵀ; below, float64 costs next to nothing
ROUNDING = 1 / 64  # what float32 may blur XᵀX by, at worst, as a part of l2; beyond, float64 is used whatever it costs
COLUMNS = 1024  # of scores that are computed together
ROWS = 1024  # test images that are looked at together
WHOLE_BELOW = 64  # pixels; smaller models see whole images in training, and so they do here

Array = npt.NDArray[Any] | Tensor | Sequence[Any]


def features(
    model: ViT,
    source: Source,
    *,
    batch_size: int = 64,
    workers: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """Return the input of the model's head for every image, float32 [images, width], and the labels.

    workers: processes that prepare images; report: called after each batch with its number of images.
    """
    if len(source) == 0:
        raise ValueError("the data set has no images.")
    where = next(model.parameters())
    # One tensor from the start: joining parts at the end would take twice the memory.
    x, labels, done = torch.empty(0), torch.empty(len(source), dtype=torch.int64), 0
    with (
        torch.inference_mode(),
        evaluation_batches(source, probe_transform(model), batch_size, workers=workers) as batches,
    ):
        for images, of_batch in batches:
            batch = model.features(images.to(where)).float().cpu()
            if not done:
                x = torch.empty(len(source), batch.shape[1])
            place = slice(done, done + len(batch))
            x[place], labels[place] = batch, of_batch
            done += len(batch)
            report(len(batch))
    return x[:done], labels[:done]  # without broken images, if the source skips them


def shot_features(
    model: ViT, train: Source, shots: Sequence[int], seeds: Sequence[int], **settings: Any
) -> tuple[Tensor, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the arguments train_x, train_y and places of `accuracies`, reading only the images that some probe needs.

    If the source skips broken images, the shots are chosen as if it did not have them. settings: as for `features`.
    """
    readable = np.arange(len(train))
    while True:
        places = needed(train.labels[readable], shots, seeds)
        if getattr(train, "on_error", "raise") == "raise":
            return features(model, part(train, places), **settings)[0], train.labels, places
        chosen = Part(train, readable[places])
        chosen.labels = chosen.indices  # tell which images were read
        train_x, read = features(model, chosen, **settings)
        if len(read) == len(places):
            return train_x, train.labels[readable], places
        readable = np.setdiff1d(readable, np.setdiff1d(chosen.indices, read.numpy()))
        if not len(readable):
            raise ValueError("none of the training images can be read.")


def probe_transform(model: ViT) -> Evaluation:
    """Return the probe's transform: resize to a square 256/224 as wide as the model's input, then crop its centre.

    There is no antialiasing, as in big_vision. A model of small images gets them whole.
    """
    height, width = model.config.image
    if height != width:
        raise ValueError(f"this model takes images of {height}×{width} pixels; probes are defined for square ones.")
    if height < WHOLE_BELOW:
        return Evaluation(height, "resize", model.config.channels)
    return Evaluation(height, "square", model.config.channels, antialias=False)


def accuracy(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    shots: int = 10,
    seed: int = 0,
    *,
    l2: float = RIDGE,
) -> float:
    """Return the accuracy on the test images of a probe fitted to `shots` training images per class.

    train_x, test_x: features, [images, width]; train_y, test_y: integer labels. numpy arrays or torch tensors.
    seed: chooses the training images, exactly as big_vision does; a class with fewer than `shots` images gives all.
    """
    return float(accuracies(train_x, train_y, test_x, test_y, shots=(shots,), seeds=(seed,), l2=(l2,))[0, 0, 0])


def accuracies(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    l2: Sequence[float] = (RIDGE,),
    places: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.float64]:
    """Return the accuracy for all shots, seeds and regularisers: [shots, seeds, l2]. Arguments as in `accuracy`.

    places: if train_x holds only some of train_y's images, their indices, ascending, which `needed` returns.
    """
    train, test = _features("train_x", train_x), _features("test_x", test_x)
    train_labels = _labels("train_y", train_y, len(train) if places is None else None)
    test_labels = _labels("test_y", test_y, len(test))
    if train.shape[1] != test.shape[1]:
        raise ValueError(
            f"train_x has {train.shape[1]} features and test_x {test.shape[1]}; they must be of one model."
        )
    check_numbers(shots, seeds, l2)
    classes = np.unique(train_labels)
    if len(missing := np.setdiff1d(test_labels, classes)):
        some = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise ValueError(f"test_y has labels that train_y lacks: {some}. A probe cannot learn a class it never sees.")
    expected = torch.from_numpy(np.searchsorted(classes, test_labels))

    orders = {seed: shuffled(train_labels, seed) for seed in seeds}
    centre = test.mean(0)  # near every probe's mean, so that the difference of the two costs no digits

    def probes() -> Iterator[tuple[Tensor, Tensor]]:
        for number in shots:
            for seed in seeds:
                chosen = [of_class[:number] for of_class in orders[seed]]
                joined = np.concatenate(chosen)
                rows = torch.from_numpy(joined if places is None else np.searchsorted(places, joined))
                probe = fit(train, rows, [len(of_class) for of_class in chosen], l2)
                for ridge in l2:
                    weights = probe.weights(ridge)
                    bias = probe.bias(ridge) + (centre - probe.mean) @ weights.double()
                    yield weights.float(), (bias - bias.mean()).float()

    together = max(1, COLUMNS // len(classes))
    right = [count for group in _groups(probes(), together) for count in _right(test, centre, expected, group)]
    return np.array(right).reshape(len(shots), len(seeds), len(l2)) / len(test)


def shuffled(labels: npt.NDArray[np.int64], seed: int) -> list[npt.NDArray[np.int64]]:
    """Return the indices of each class in `labels`, in the order in which shots are taken."""
    generator = np.random.default_rng(seed)
    places = np.argsort(labels, kind="stable")
    _, starts = np.unique(labels[places], return_index=True)
    return [generator.permutation(of_class) for of_class in np.split(places, starts[1:])]


def needed(labels: npt.NDArray[np.int64], shots: Sequence[int], seeds: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the indices, ascending, of all training images that some probe uses: most data sets have far more."""
    most = max(shots)
    return np.unique(np.concatenate([of_class[:most] for seed in seeds for of_class in shuffled(labels, seed)]))


@dataclass(frozen=True)
class Probe:
    """A regression that is factorised, to be solved for any l2: scores are (x − mean) · weights(l2) + bias(l2)."""

    mean: Tensor
    weights: Callable[[float], Tensor]
    """From l2 to [width, classes]."""
    counts: Tensor

    def bias(self, l2: float) -> Tensor:
        """Return what the constant feature adds to the score of each class."""
        images = self.counts.sum()
        return CONSTANT**2 * (2 * self.counts - images) / (CONSTANT**2 * images + l2)


def fit(features: Tensor, rows: Tensor, counts: Sequence[int], l2: Sequence[float]) -> Probe:
    """Fit a probe to some rows of features, which are sorted by class, `counts` of each, for use with these l2.

    It is computed in float64, as exactly as float32 features allow; where that would take long, in float32, if its
    rounding of XᵀX, at most about images · width · 2⁻²³, is small enough against the smallest l2.
    """
    images, width = len(rows), features.shape[1]
    large = images * width * min(images, width) > LARGE
    fine = images * width * torch.finfo(torch.float32).eps < ROUNDING * min(l2)
    x = features[rows].to(torch.float32 if large and fine else torch.float64)
    first = x[0].clone()
    x -= first  # a feature that never varies becomes exactly zero, and stays it
    shift = x.mean(0)
    x -= shift
    of_class = torch.tensor(counts)
    labels = torch.arange(len(counts)).repeat_interleave(of_class)

    if images >= width:
        products = _products(x)
        scale = 1 / ((products.diagonal() / images).sqrt() + EPSILON)
        sums = x.new_zeros(len(counts), width).index_add_(0, labels, x)
        # Xᵀ times the targets, of which +1 counts twice and −1 not at all: whitened columns sum to zero.
        solve = _factorised(products * scale * scale.unsqueeze(1), 2 * scale.unsqueeze(1) * sums.T, len(l2))
        return Probe(first.double() + shift, lambda ridge: scale.unsqueeze(1) * solve(ridge), of_class)
    scale = 1 / (x.square().mean(0).sqrt() + EPSILON)
    x *= scale
    targets = F.one_hot(labels, len(counts)).to(x.dtype)
    solve = _factorised(x @ x.T, 2 * (targets - targets.mean(0)), len(l2))
    return Probe(first.double() + shift, lambda ridge: scale.unsqueeze(1) * (x.T @ solve(ridge)), of_class)


def _products(x: Tensor, blocks: int = 4) -> Tensor:
    """Return XᵀX, of which the part far above the diagonal is left zero: nobody reads it."""
    width = x.shape[1]
    products = x.new_zeros(width, width)
    step = math.ceil(width / blocks)
    for left in range(0, width, step):
        products[left:, left : left + step] = x[:, left:].T @ x[:, left : left + step]
    return products


def _factorised(matrix: Tensor, right: Tensor, regularisers: int) -> Callable[[float], Tensor]:
    """Return a function from l2 to the solution W of (matrix + l2·I)·W = right. Only the lower triangle is read."""
    if regularisers == 1:

        def solve(ridge: float) -> Tensor:
            shifted = matrix.clone()
            shifted.diagonal().add_(ridge)
            return torch.cholesky_solve(right, torch.linalg.cholesky(shifted))

        return solve
    values, vectors = torch.linalg.eigh(matrix)
    turned = vectors.T @ right
    return lambda ridge: vectors @ (turned / (values + ridge).unsqueeze(1))


def _groups(items: Iterator[tuple[Tensor, Tensor]], size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    while group := list(islice(items, size)):
        yield group


def _right(test: Tensor, centre: Tensor, expected: Tensor, probes: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Count the test images that each of some probes gets right."""
    weights = torch.cat([weights for weights, _ in probes], 1)
    bias = torch.cat([bias for _, bias in probes])
    right = torch.zeros(len(probes), dtype=torch.int64)
    for x, labels in zip(test.split(ROWS), expected.split(ROWS), strict=True):
        scores = torch.addmm(bias, x - centre, weights).view(len(x), len(probes), -1)
        right += (scores.argmax(2) == labels.unsqueeze(1)).sum(0)
    return right.tolist()


def _features(name: str, given: Array) -> Tensor:
    x = torch.as_tensor(given).detach().to("cpu", torch.float32)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} has the shape {list(x.shape)}; it must be [images, width], both at least 1.")
    if not math.isfinite(torch.linalg.vector_norm(x)):
        finite = x.isfinite().all(1)
        if finite.all():
            raise ValueError(f"{name} has values of up to {float(x.abs().max()):.1g}, whose squares exceed float32.")
        first = int((~finite).nonzero()[0])
        raise ValueError(f"{name} is not finite in {int((~finite).sum())} of {len(x)} images, first in image {first}.")
    return x.contiguous()


def _labels(name: str, given: Array, images: int | None) -> npt.NDArray[np.int64]:
    labels = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if not np.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"{name} is {labels.dtype}; labels must be integers.")
    if labels.ndim != 1 or len(labels) == 0 or len(labels) != (images or len(labels)):
        features = name.replace("y", "x")
        of = "" if images is None else f", but {features} has {images} images"
        raise ValueError(f"{name} has the shape {list(labels.shape)}{of}; there must be one label for each image.")
    return labels.astype(np.int64)


def check_numbers(shots: Sequence[int], seeds: Sequence[int], l2: Sequence[float]) -> None:
    """Raise a ValueError if the settings of a probe make no sense."""
    for name, values in (("shots", shots), ("seed", seeds), ("l2", l2)):
        if len(values) == 0:
            raise ValueError(f"{name} is empty; give at least one.")
        for value in values:
            if name == "l2":
                good, allowed = math.isfinite(value) and value > 0, "a finite number above 0"
            else:
                least = int(name == "shots")
                good, allowed = isinstance(value, int) and value >= least, f"an integer of at least {least}"
            if not good:
                raise ValueError(f"{name}={value!r} must be {allowed}.")
