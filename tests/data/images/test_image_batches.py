"""Batches: the same to the bit for every number of workers and ranks and from every step on; nothing broken goes by."""

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import broken_folder, fill, picture
from torch import Tensor

from nomax.data.images import workers as pipeline
from nomax.data.images.batches import Batch, Batches, batches, evaluation_batches, mixup_weight
from nomax.data.images.files import FolderSource
from nomax.data.images.transforms import Augment, Evaluation
from nomax.data.order import Order
from nomax.data.source import ArraySource, DataError, part

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create"
)  # more workers than this machine has cores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("images"), {"a": 4, "b": 3, "c": 4})


def arrays(count: int = 11, size: int = 16, grey: bool = False) -> ArraySource:
    random = np.random.default_rng(0)
    shape = (count, size, size) if grey else (count, size, size, 3)
    return ArraySource(random.integers(0, 256, shape, dtype=np.uint8), np.arange(count) % 3, ["a", "b", "c"], "noise")


def first(made: Batches[Batch], steps: int) -> list[Batch]:
    with made:
        return list(itertools.islice(made, steps))


def equal(some: list[Batch], others: list[Batch]) -> bool:
    return [batch.step for batch in some] == [batch.step for batch in others] and all(
        torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets) for a, b in zip(some, others, strict=True)
    )


SETTINGS = {
    "crops of files": (FolderSource, Augment(16), 0.0),
    "everything at once": (FolderSource, Augment(16, randaug=(2, 15)), 0.3),
    "arrays, moved": (arrays, Augment(16, "pad"), 0.0),
    "arrays, mixed": (arrays, Augment(16, "pad"), 0.2),
    "arrays, cropped": (arrays, Augment(8), 0.2),
}


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Batches[Batch]]:
    make, augment, mixup = SETTINGS[request.param]
    source = make(folder) if make is FolderSource else make()
    order = Order(len(source), 6, seed=5)
    return lambda **options: batches(source, order, augment, mixup=mixup, **options)


def test_any_number_of_workers_makes_the_same_batches(setting: Callable[..., Batches[Batch]]) -> None:
    alone = first(setting(), 5)
    assert equal(first(setting(workers=1), 5), alone)
    assert equal(first(setting(workers=3), 5), alone)


def test_a_run_goes_on_from_any_step_as_if_it_had_not_stopped(setting: Callable[..., Batches[Batch]]) -> None:
    whole = first(setting(), 6)
    for start in (1, 4):
        assert equal(first(setting(start=start), 6 - start), whole[start:])
    assert equal(first(setting(start=3, workers=1), 2), whole[3:5])


@pytest.mark.parametrize("world", [2, 3, 6])
def test_the_ranks_together_have_the_whole_batch(setting: Callable[..., Batches[Batch]], world: int) -> None:
    whole = first(setting(), 3)
    shares = [first(setting(rank=rank, world=world), 3) for rank in range(world)]
    for batch, parts in zip(whole, zip(*shares, strict=True), strict=True):
        assert torch.equal(batch.images, torch.cat([part.images for part in parts]))
        assert torch.equal(batch.targets, torch.cat([part.targets for part in parts]))


def test_large_batches_are_made_in_pieces_and_are_the_same(
    setting: Callable[..., Batches[Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = first(setting(), 3)
    monkeypatch.setattr(pipeline, "CHUNK", 4)
    assert equal(first(setting(), 3), whole)
    assert equal(first(setting(workers=2), 3), whole)


def test_every_image_comes_with_its_label_and_once_an_epoch() -> None:
    source = arrays(count=12)
    made = first(batches(source, Order(12, 4), Augment(16, "none", flip=False)), 6)
    for epoch in (made[:3], made[3:]):
        images, labels = torch.cat([b.images for b in epoch]), torch.cat([b.targets for b in epoch])
        bytes_again = ((images + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        numbers = [int(np.flatnonzero((source.images == image).all((1, 2, 3)))[0]) for image in bytes_again]
        assert sorted(numbers) == list(range(12))
        assert labels.tolist() == source.labels[numbers].tolist()
        assert labels.dtype == torch.int64


def test_values_go_from_minus_one_to_one() -> None:
    pixels = np.zeros((2, 4, 4, 3), np.uint8)
    pixels[1] = 255
    pixels[1, 0, 0] = 51
    source = ArraySource(pixels, [0, 1], ["a", "b"], "black and white")
    (batch,) = first(batches(source, Order(2, 2, shuffle=False), Augment(4, "none", flip=False)), 1)
    assert batch.images.dtype == torch.float32
    assert batch.images.is_contiguous()
    assert batch.images[0].unique().tolist() == [-1]
    assert batch.images[1].unique().tolist() == [pytest.approx(-0.6, rel=0, abs=2**-24), 1]


@pytest.mark.parametrize(("grey", "channels"), [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_grey_and_coloured_sources_have_as_many_channels_as_wanted(grey: bool, channels: int, tmp_path: Path) -> None:
    source = arrays(grey=grey)
    for augment in (Augment(16, "pad", channels=channels), Augment(8, channels=channels)):
        (batch,) = first(batches(source, Order(11, 5), augment), 1)
        assert batch.images.shape == (5, channels, augment.size, augment.size)
        if grey and channels == 3:
            assert torch.equal(batch.images[:, 0], batch.images[:, 2])
    mixed = fill(tmp_path, {"a": 2})
    picture(7).convert("L").save(mixed / "a" / "grey.png")
    (batch,) = first(batches(FolderSource(mixed), Order(3, 3), Augment(8, channels=channels, randaug=(1, 10))), 1)
    assert batch.images.shape == (3, channels, 8, 8)


def test_mixup_mixes_each_image_with_the_one_before_it() -> None:
    source, order, augment = arrays(), Order(11, 6, seed=9), Augment(16, "pad")
    plain = first(batches(source, order, augment), 3)
    rounding = {"rtol": 0, "atol": 4 * 2**-24}  # two weights, two products and a sum in float32, of values up to 1
    for batch, mixed in zip(plain, first(batches(source, order, augment, mixup=0.5, num_classes=4), 3), strict=True):
        kept = mixup_weight(0.5, 9, batch.step)
        assert 0.5 <= kept <= 1
        before = batch.images.roll(1, 0).double() * (1 - kept)
        assert torch.allclose(mixed.images.double(), batch.images.double() * kept + before, **rounding)
        rows = torch.nn.functional.one_hot(batch.targets, 4).double()
        assert torch.allclose(mixed.targets.double(), rows * kept + rows.roll(1, 0) * (1 - kept), **rounding)


@pytest.mark.parametrize("p", [0.2, 0.5, 2.0])
def test_the_share_that_mixup_keeps_has_the_moments_of_beta(p: float) -> None:
    """λ and 1 - λ are alike, so the variance of the larger one about 1/2 is that of Beta(p, p)."""
    kept = np.array([mixup_weight(p, 0, step) for step in range(4000)])
    square = (kept - 0.5) ** 2
    error = 5 * square.std() / np.sqrt(len(square))
    assert abs(square.mean() - 1 / (4 * (2 * p + 1))) < error


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_ends_the_run_with_its_name(workers: int, tmp_path: Path) -> None:
    source = FolderSource(broken_folder(tmp_path))
    made = batches(source, Order(7, 2, shuffle=False), Augment(8), workers=workers)
    assert next(made).step == 0
    with pytest.raises(DataError, match=r"^\S*a/002\.jpg is a broken image: image file is truncated") as caught:
        next(made)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_where_the_user_said_so_the_next_good_image_stands_in_and_is_counted(
    workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = FolderSource(broken_folder(tmp_path), on_error="skip")
    order, augment = Order(7, 7, shuffle=False), Augment(8, "inception", flip=False)
    with (
        caplog.at_level(logging.WARNING, "nomax.data"),
        batches(source, order, augment, workers=workers) as made,
    ):
        batch = next(made)
        next(made)
    assert batch.targets.tolist() == [0, 0, 0, 0, 1, 1, 0]  # the one after the last is the first
    assert sorted(made.skipped) == [str(tmp_path / "a" / "002.jpg"), str(tmp_path / "b" / "002.jpg")]
    assert caplog.text.count("broken: ") == 2
    assert "2 broken images were skipped" in caplog.text
    # What stands in is at the broken one's position, and so gets that position's crop.
    (tmp_path / "a" / "002.jpg").write_bytes((tmp_path / "a" / "003.jpg").read_bytes())
    (tmp_path / "b" / "002.jpg").write_bytes((tmp_path / "a" / "000.jpg").read_bytes())
    (mended,) = first(batches(FolderSource(tmp_path), order, augment), 1)
    assert torch.equal(mended.images, batch.images)


def test_a_source_in_which_everything_is_broken_ends_with_an_error(tmp_path: Path) -> None:
    fill(tmp_path, {"a": 3})
    for path in (tmp_path / "a").iterdir():
        path.write_bytes(b"hello")
    with pytest.raises(DataError, match=r"3 images in a row are broken: .*not a JPEG"):
        next(batches(FolderSource(tmp_path, on_error="skip"), Order(3, 2), Augment(8)))


def collected(made: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*made, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_goes_once_over_the_source_in_its_order(workers: int, folder: Path) -> None:
    source = FolderSource(folder)
    made = list(evaluation_batches(source, 16, 4, workers=workers))
    assert [len(labels) for _, labels in made] == [4, 4, 3]
    images, labels = collected(iter(made))
    assert labels.tolist() == source.labels.tolist()
    transform = Evaluation(16)
    for index in (0, 5, 10):
        image = source.image(index)
        expected = torch.from_numpy(transform.resized(image, transform.box(*image.size, 0, 0))) / 127.5 - 1
        assert torch.equal(images[index], expected)


def test_evaluation_leaves_broken_images_out_where_the_user_said_so(tmp_path: Path) -> None:
    path = broken_folder(tmp_path)
    with pytest.raises(DataError, match=r"002\.jpg"):
        list(evaluation_batches(FolderSource(path), 8, 3))
    made = evaluation_batches(FolderSource(path, on_error="skip"), 8, 1)
    assert collected(made)[1].tolist() == [0, 0, 0, 1, 1]
    assert len(made.skipped) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_of_a_source_does_about_broken_images_what_the_whole_does(workers: int, tmp_path: Path) -> None:
    path = broken_folder(tmp_path)
    some = np.array([6, 2, 5, 0])  # two broken ones among them, and in another order
    made = evaluation_batches(part(FolderSource(path, on_error="skip"), some), 8, 2, workers=workers)
    images, labels = collected(made)
    assert labels.tolist() == [1, 0]
    assert len(made.skipped) == 2
    good, _ = collected(evaluation_batches(part(FolderSource(path), some[2:]), 8, 2))
    assert torch.equal(images, good)
    with pytest.raises(DataError, match=r"b/002\.jpg"):
        list(evaluation_batches(part(FolderSource(path), some), 8, 2, workers=workers))
    whole = FolderSource(path)
    assert part(whole, np.arange(7)) is whole
    assert part(whole, np.arange(7)[::-1]).labels.tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_evaluation_takes_arrays_as_they_are() -> None:
    source = arrays()
    images, _ = collected(evaluation_batches(source, Augment(16, "pad").evaluation(), 4))
    assert torch.equal(images, torch.from_numpy(source.images).permute(0, 3, 1, 2) / 127.5 - 1)


def test_labels_that_the_model_has_no_class_for_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"noise, image 2 \(c\) has the label 2, but there are num_classes = 2 \(3 of 11"
    ):
        batches(arrays(), Order(11, 4), Augment(16, "pad"), num_classes=2)


@pytest.mark.parametrize(
    ("order", "augment", "options", "message"),
    [
        (Order(12, 4), Augment(16, "pad"), {}, "the order is for 12 images, but the source has 11"),
        (Order(11, 4), Augment(24, "pad"), {}, 'is 16×16, but size is 24, .* Choose size=16 or crop="resize"'),
        (Order(11, 4), Augment(16, "pad"), {"world": 3}, "batch_size 4 cannot be shared"),
        (Order(11, 4), Augment(16, "pad"), {"workers": -1}, "workers is -1"),
        (Order(11, 4), Augment(16, "pad"), {"mixup": -0.1}, "mixup is -0.1"),
        (Order(11, 4), Augment(16, "pad"), {"start": -1}, "step -1"),
    ],
)
def test_what_cannot_be_is_said_at_once(order: Order, augment: Augment, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(arrays(), order, augment, **options)


def test_a_file_of_another_size_is_named_where_images_are_taken_as_they_are(folder: Path) -> None:
    with pytest.raises(DataError, match=r"\.jpg is 40×30, but size is 16"):
        next(batches(FolderSource(folder), Order(11, 4), Augment(16, "none")))
