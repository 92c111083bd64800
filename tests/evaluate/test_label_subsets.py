"""Label-subset accuracy and the maps from small sets of classes to the columns of a large head."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nomax import _compat
from nomax.evaluate import LabelMap, subset_accuracy
from nomax.evaluate.accuracy import imagenet_1k_in_21k, read_subset


def test_only_the_chosen_columns_compete() -> None:
    logits = torch.tensor([[9.0, 1, 2, 3], [0, 5, 4, 9], [9, 0, 2, 1], [7, 8, 9, 6]])
    # Among the columns 3 and 1, in this order, the largest are 3, 3, 3 and 1.
    assert subset_accuracy(logits, torch.tensor([0, 0, 0, 1]), [3, 1]) == 1
    assert subset_accuracy(logits, torch.tensor([1, 1, 1, 1]), [3, 1]) == 0.25
    assert subset_accuracy(logits, torch.tensor([0, 3, 0, 2]), [0, 1, 2, 3]) == 1


def test_a_loop_over_images_gives_the_same() -> None:
    generator = np.random.default_rng(0)
    logits, columns = generator.normal(size=(200, 50)), generator.permutation(50)[:11]
    labels = generator.integers(0, 11, 200)
    right = [
        max(range(11), key=lambda place: row[columns[place]]) == label
        for row, label in zip(logits, labels, strict=True)
    ]
    result = subset_accuracy(torch.from_numpy(logits), torch.from_numpy(labels), columns)
    assert result == pytest.approx(sum(right) / 200)


def test_a_class_without_a_column_is_never_predicted() -> None:
    logits = torch.full((2, 3), -50.0)
    assert subset_accuracy(logits, torch.tensor([0, 1]), [-1, 2]) == 0.5


def test_imagenet_1k_lies_in_21k_by_its_wordnet_ids() -> None:
    subset = imagenet_1k_in_21k()
    assert subset.head == 21_843
    assert len(subset.columns) == len(subset.names) == 1_000
    assert subset.names[:2] == ("n01440764", "n01443537")  # tench and goldfish
    assert list(subset.names) == sorted(subset.names)
    # ImageNet-21k has all of them but the teddy bear.
    assert subset.absent == [850]
    assert subset.names[850] == "n04399382"
    _compat.timm()
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-21k-goog")
    for place in (0, 1, 499, 999):
        assert info.index_to_label_name(int(subset.columns[place])) == subset.names[place]


def test_a_file_may_hold_columns_or_names(tmp_path: Path) -> None:
    classes = ["ant", "bee", "cat", "dog"]
    (tmp_path / "names.txt").write_text("# insects\nbee\n\nant\n")
    (tmp_path / "columns.txt").write_text("3\n0\n")
    (tmp_path / "list.json").write_text(json.dumps([2, "dog"]))
    for name, columns in {"names.txt": [1, 0], "columns.txt": [3, 0], "list.json": [2, 3]}.items():
        subset = read_subset(tmp_path / name, classes)
        assert subset.columns.tolist() == columns
        assert subset.names == tuple(classes[column] for column in columns)
        assert subset.head == 4


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("cow", "'cow' is neither one of the 2 classes"),
        ("4", "'4' is neither"),
        ("ant\nant", "different columns"),
        ("", "different"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(text: str, answer: str, tmp_path: Path) -> None:
    (tmp_path / "subset.txt").write_text(text)
    with pytest.raises(ValueError, match=answer) as error:
        read_subset(tmp_path / "subset.txt", ["ant", "bee"])
    assert "subset.txt" in str(error.value)


@pytest.mark.parametrize("columns", [[0, 4], [-2, 0], []])
def test_columns_outside_the_head_are_refused(columns: list[int]) -> None:
    with pytest.raises(ValueError, match="columns must hold numbers from 0 to 3"):
        subset_accuracy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long), columns)


def test_labels_must_belong_to_the_logits() -> None:
    with pytest.raises(ValueError, match=r"\[2, 4\] and \[3\]"):
        subset_accuracy(torch.zeros(2, 4), torch.zeros(3, dtype=torch.long), [0])


def test_a_map_knows_what_the_head_cannot_say() -> None:
    assert LabelMap("m", np.array([4, -1, 0]), 5).absent == [1]
