"""The few-shot probe: big_vision's protocol, against plain normal equations in float64 and scikit-learn."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.linear_model import RidgeClassifier

from nomax.evaluate import fewshot

NEAR_TIE = 1.5 / 997  # one test image whose two best scores differ by a rounding

Data = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def near(accuracy: float) -> Any:
    return pytest.approx(accuracy, abs=NEAR_TIE)


def data(images: int = 300, width: int = 20, classes: int = 7, seed: int = 1, noise: float = 2.5) -> Data:
    """Features of overlapping classes, with means and scales as different as real ones, in no order."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(classes, width))
    scales, offsets = generator.uniform(0.1, 10, width), generator.normal(scale=20, size=width)

    def draw(number: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        labels = generator.permutation(np.arange(number) % classes)
        x = (centres[labels] + noise * generator.normal(size=(number, width))) * scales + offsets
        return x.astype(np.float32), labels

    return (*draw(images), *draw(997))


def select(labels: npt.NDArray[Any], shots: int, seed: int) -> npt.NDArray[Any]:
    """big_vision's choice of images, as its evaluator writes it."""
    generator = np.random.default_rng(seed)
    permuted = [generator.permutation(np.where(labels == label)[0]) for label in range(labels.max() + 1)]
    return np.concatenate([places[:shots] for places in permuted])


def whitened(train: npt.NDArray[Any], test: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Features of the protocol, with the constant, in float64."""
    train, test = train.astype(np.float64), test.astype(np.float64)
    mean, deviation = train.mean(0), train.std(0) + 1e-5
    return tuple(np.pad((x - mean) / deviation, ((0, 0), (0, 1)), constant_values=100.0) for x in (train, test))  # type: ignore[return-value]


def oracle(given: Data, shots: int, seed: int, l2: float) -> float:
    """The whole protocol by the normal equations, in float64."""
    train_x, train_y, test_x, test_y = given
    chosen = select(train_y, shots, seed)
    x, test = whitened(train_x[chosen], test_x)
    targets = np.where(train_y[chosen, None] == np.arange(train_y.max() + 1), 1.0, -1.0)
    weights = np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ targets)
    return float(np.mean((test @ weights).argmax(1) == test_y))


# More features than images; as many as either; more images than features.
@pytest.mark.parametrize("width", [129, 70, 20])
@pytest.mark.parametrize("shots", [1, 5, 10, 25])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_probe_is_the_protocol_of_big_vision(width: int, shots: int, seed: int) -> None:
    given = data(width=width)
    assert fewshot.accuracy(*given, shots=shots, seed=seed) == near(oracle(given, shots, seed, 2.0**10))


@pytest.mark.parametrize("l2", [2.0**-10, 1.0, 2.0**20])
@pytest.mark.parametrize("width", [129, 20])
def test_the_regulariser_counts(l2: float, width: int) -> None:
    given = data(width=width)
    assert fewshot.accuracy(*given, shots=12, l2=l2) == near(oracle(given, 12, 0, l2))


@pytest.mark.parametrize("width", [129, 20])
def test_one_factorisation_gives_what_separate_fits_give(width: int) -> None:
    given = data(width=width)
    shots, seeds, l2 = (1, 10, 1000), (0, 3), (0.01, 1.0, 2.0**10, 2.0**17)
    result = fewshot.accuracies(*given, shots=shots, seeds=seeds, l2=l2)
    assert result.shape == (3, 2, 4)
    for place in np.ndindex(*result.shape):
        expected = oracle(given, shots[place[0]], seeds[place[1]], l2[place[2]])
        assert result[place] == near(expected)


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("l2", [(2.0**10,), (100.0, 2.0**10, 2.0**15)])
@pytest.mark.parametrize(("images", "width"), [(301, 20), (60, 129)])
def test_scores_are_those_of_scikit_learn(
    images: int, width: int, l2: tuple[float, ...], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision == "float32":
        monkeypatch.setattr(fewshot, "LARGE", 0)
    train_x, train_y, test_x, _ = data(images=images, width=width)
    order = np.argsort(train_y, kind="stable")
    probe = fewshot.fit(torch.from_numpy(train_x), torch.from_numpy(order), np.bincount(train_y).tolist(), l2)
    x, test = whitened(train_x[order], test_x)
    for ridge in l2:
        weights = probe.weights(ridge)
        assert weights.dtype == getattr(torch, precision)
        peer = RidgeClassifier(alpha=ridge, fit_intercept=False).fit(x, train_y[order])
        expected = peer.decision_function(test)
        ours = (torch.from_numpy(test_x).double() - probe.mean) @ weights.double() + probe.bias(ridge)
        digits = 1e-6 if precision == "float64" else 1e-5  # features are float32 in any case
        assert np.abs(ours.numpy() - expected).max() < digits * np.abs(expected).max()


@pytest.mark.parametrize("l2", [2.0**10, 1e-3])
def test_thousands_of_images_agree_with_scikit_learn(l2: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewshot, "LARGE", 0)  # float32, but for an l2 that it is too coarse for
    train_x, train_y, test_x, test_y = data(images=4000, width=96, classes=30, noise=4.0)
    x, test = whitened(train_x, test_x)
    peer = RidgeClassifier(alpha=l2, fit_intercept=False).fit(x, train_y)
    result = fewshot.accuracy(train_x, train_y, test_x, test_y, shots=4000, l2=l2)
    assert result == near(peer.score(test, test_y))
    assert 0.2 < result < 0.9  # neither hopeless nor trivial


def test_features_that_do_not_vary_among_the_shots_are_ignored() -> None:
    train_x, train_y, test_x, test_y = data(width=20)
    expected = fewshot.accuracy(train_x, train_y, test_x, test_y)
    dead = np.full((len(train_x), 3), 1 / 3, np.float32)
    alive = np.random.default_rng(0).normal(size=(len(test_x), 3)).astype(np.float32)
    result = fewshot.accuracy(np.hstack([train_x, dead]), train_y, np.hstack([test_x, alive]), test_y)
    assert result == expected


def test_equal_scores_go_to_the_first_class() -> None:
    x = np.ones((12, 3), np.float32)
    labels = np.arange(12) % 4
    assert fewshot.accuracy(x, labels, x, labels, shots=2) == 0.25


def test_a_class_with_fewer_images_than_shots_gives_all_of_them() -> None:
    train_x, train_y, test_x, test_y = data(classes=3)
    kept = np.flatnonzero((train_y != 2) | (np.cumsum(train_y == 2) <= 2))
    given = (train_x[kept], train_y[kept], test_x, test_y)
    assert fewshot.accuracy(*given, shots=40) == near(oracle(given, 40, 0, 2.0**10))


def test_labels_need_not_begin_at_zero_nor_be_dense() -> None:
    train_x, train_y, test_x, test_y = data()
    names = np.array([3, 10, 11, 500, 501, 502, 9000])
    result = fewshot.accuracies(train_x, names[train_y], test_x, names[test_y])
    assert (result == fewshot.accuracies(train_x, train_y, test_x, test_y)).all()


def test_tensors_lists_and_half_precision_are_taken() -> None:
    given = data(images=40, width=5)
    expected = fewshot.accuracies(*given)
    tensors = tuple(torch.from_numpy(array) for array in given)
    assert (fewshot.accuracies(*tensors) == expected).all()
    assert (fewshot.accuracies(*(array.tolist() for array in given)) == expected).all()
    assert (fewshot.accuracies(tensors[0].double(), tensors[1].int(), *tensors[2:]) == expected).all()
    halves = (tensors[0].bfloat16(), tensors[1], tensors[2].bfloat16(), tensors[3])
    rounded = (halves[0].float().numpy(), given[1], halves[2].float().numpy(), given[3])
    assert fewshot.accuracy(*halves) == near(oracle(rounded, 10, 0, 2.0**10))


def test_only_the_needed_images_give_the_same_result() -> None:
    train_x, train_y, test_x, test_y = data()
    shots, seeds = (1, 4), (0, 5)
    places = fewshot.needed(train_y, shots, seeds)
    assert len(places) <= 2 * 4 * 7 < len(train_y)
    result = fewshot.accuracies(train_x[places], train_y, test_x, test_y, shots=shots, seeds=seeds, places=places)
    assert (result == fewshot.accuracies(train_x, train_y, test_x, test_y, shots=shots, seeds=seeds)).all()


def test_inputs_are_left_as_they_are() -> None:
    given = data(width=129)
    before = [array.copy() for array in given]
    fewshot.accuracies(*given, l2=(1.0, 2.0))
    assert all((array == copy).all() for array, copy in zip(given, before, strict=True))


def bad(**changes: Any) -> dict[str, Any]:
    names = ("train_x", "train_y", "test_x", "test_y")
    return dict(zip(names, data(images=21, width=4), strict=True)) | changes


NAN = data(images=21, width=4)[0].copy()
NAN[3, 2] = NAN[7, 0] = np.nan


@pytest.mark.parametrize(
    ("settings", "kind", "answer"),
    [
        (bad(train_y=np.zeros(20, int)), ValueError, r"train_y has the shape \[20\], but train_x has 21 images"),
        (bad(test_y=np.zeros(3, int)), ValueError, r"test_y has the shape \[3\], but test_x has 997 images"),
        (bad(test_x=np.zeros((997, 5))), ValueError, "train_x has 4 features and test_x 5"),
        (bad(test_x=np.zeros((0, 4)), test_y=np.zeros(0, int)), ValueError, r"test_x has the shape \[0, 4\]"),
        (bad(train_x=NAN), ValueError, "train_x is not finite in 2 of 21 images, first in image 3"),
        (bad(test_x=np.full((997, 4), 3e37)), ValueError, r"test_x has values of up to 3e\+37"),
        (bad(train_y=np.zeros(21, int)), ValueError, "test_y has labels that train_y lacks: 1, 2, 3, 4, 5, …"),
        (bad(train_y=np.zeros(21)), TypeError, "train_y is float64; labels must be integers"),
        (bad(shots=0), ValueError, "shots=0 must be an integer of at least 1"),
        (bad(shots=1.5), ValueError, "shots=1.5 must be an integer"),
        (bad(seed=-1), ValueError, "seed=-1 must be an integer of at least 0"),
        (bad(l2=0.0), ValueError, "l2=0.0 must be a finite number above 0"),
        (bad(l2=float("nan")), ValueError, "l2=nan must be"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], kind: type[Exception], answer: str) -> None:
    with pytest.raises(kind, match=answer):
        fewshot.accuracy(**settings)
