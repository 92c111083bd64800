"""Icons: thousands of classes of small drawings by many authors, rendered from the sets that one package collects.

A class is an icon's name without its style (`class_names`). The test images are those of whole sets, whose authors drew
nothing that is trained on. A drawing that occurs several times is kept once in each class, and left out of the test
images if it is among the training images at all.
"""

import hashlib
import io
import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax._files import atomic, write
from nomax.data.prepare.packages import Job, matching, members

SIDE = 32
FEWEST = 5  # images of a class
SUBSET_FEWEST = 30  # images of a class of the subset
# Free to use and to pass on, with attribution where asked for. Left out: non-commercial, GPL and unknown terms.
LICENCES = {
    *("MIT", "Apache-2.0", "ISC", "BSD-3-Clause", "Unlicense", "CC0-1.0", "OFL-1.1", "MPL-2.0"),
    *("CC-BY-3.0", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0"),
}
# About 8 % of the images, drawn by lot from families of sets: tools/choose_icon_test_sets.py wrote this.
TEST_SETS = frozenset(
    (
        *("arcticons", "carbon", "ci", "clarity", "entypo", "entypo-social", "ep", "eva", "fe"),
        *("flowbite", "formkit", "foundation", "garden", "hugeicons", "icons8", "la", "mynaui", "oui"),
        *("pixel", "ri", "roentgen", "stash", "token", "vadivam", "weui", "wpf", "zmdi"),
    )
)

# Endings that are a style in some sets and part of the name in others ("home-line", but "chart-line"): they are dropped
# where at least this share of a set's icons, and this many, end so.
STYLE_SHARE, STYLE_FEWEST = 0.02, 10
ENDINGS = frozenset(
    (
        *("outline", "outlined", "line", "linear", "stroke", "filled", "fill", "solid", "f", "bold"),
        *("thin", "light", "regular", "medium", "duotone", "duo", "twotone", "rounded", "round"),
        *("sharp", "broken", "remix", "bulk", "alt", "variant", "o", "expressive", "minimalistic"),
        *("small", "compact", "large", "ltr", "rtl", "mirrored", "logo", "one", "two", "three", "four"),
    )
)
BEGINNINGS = frozenset(("brand", "logo", "logos", "social"))
_NUMBER = re.compile(r"\d\d?(px)?")  # sizes and variants: home-24, home-02
_SET = re.compile(r"package/json/([a-z0-9]+(?:-[a-z0-9]+)*)\.json")


def prepare(job: Job) -> dict[str, Any]:
    """Render the icons of all classes that have enough of them, and divide them into training and test images."""
    (file,) = job.packages.values()
    sets = collections(file)
    wanted = choose(file, sets)
    render_all(job, file, sets, wanted)
    # Training sets come first, so that what they share with the test sets stays with them.
    order = sorted((prefix for prefix in wanted if wanted[prefix]), key=lambda prefix: (prefix in TEST_SETS, prefix))
    images = np.concatenate([np.load(_part(job, prefix)) for prefix in order])
    names = np.array([name for prefix in order for name in wanted[prefix].values()])
    origins = np.repeat(np.arange(len(order)), [len(wanted[prefix]) for prefix in order])
    testing = np.array([prefix in TEST_SETS for prefix in order])[origins]

    kept = usable(images, names, testing, least=FEWEST, train=1, test=0)
    images, names, origins, train = images[kept], names[kept], origins[kept], int((~testing[kept]).sum())
    classes, labels = np.unique(names, return_inverse=True)
    job.write_images(images, labels)
    np.save(job.folder / "sets.npy", origins.astype(np.int16))
    about = {prefix: _about(sets[prefix], prefix, int((origins == index).sum())) for index, prefix in enumerate(order)}
    write(job.folder / "ATTRIBUTION.txt", attribution(about))
    return {
        "classes": classes.tolist(),
        "splits": {"train": (0, train), "test": (train, len(images))},
        "subset": np.flatnonzero(np.bincount(labels) >= SUBSET_FEWEST).tolist(),
        "subset_rule": f"those with at least {SUBSET_FEWEST} images, by their labels",
        "sets": about,
        "sets_rule": "sets.npy holds for each image the position of its set in this list",
        "made_with": made_with(),
    }


def collections(file: Path) -> dict[str, dict[str, Any]]:
    """Return the sets in one colour whose licences allow their use, with what the package says about each."""
    ((_, listed),) = members(file, lambda name: name == "package/collections.json")
    return {
        prefix: about
        for prefix, about in sorted(json.loads(listed).items())
        if about.get("palette") is False and about.get("license", {}).get("spdx") in LICENCES
    }


def choose(file: Path, sets: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Choose for each set the icons whose class has enough icons in all sets together, with their classes."""
    classes = {
        prefix: class_names(list(icons), content.get("prefixes", ()), content.get("suffixes", ()))
        for prefix, content, icons in _contents(file, sets)
    }
    counts = Counter(name for of_set in classes.values() for name in of_set.values())
    return {
        prefix: {icon: name for icon, name in of_set.items() if counts[name] >= FEWEST}
        for prefix, of_set in classes.items()
    }


def render_all(job: Job, file: Path, sets: dict[str, Any], wanted: dict[str, dict[str, str]]) -> None:
    """Render the wanted icons, each set into a file of its own; sets that were rendered before are left as they are."""
    total, done = sum(map(len, wanted.values())), 0
    for prefix, content, icons in _contents(file, sets):
        part = _part(job, prefix)
        if not part.exists():
            drawings = [svg(icons[icon], content) for icon in wanted[prefix]]
            _render(drawings, part, partial(_report, job, done, total))
        done += len(wanted[prefix])
        _report(job, done, total, 0)


def svg(icon: dict[str, Any], content: dict[str, Any]) -> str:
    """Return the whole drawing of an icon; what it does not say itself stands in the content of its set."""
    defaults = {"left": 0, "top": 0, "width": 16, "height": 16}
    box = " ".join(str(icon.get(key, content.get(key, default))) for key, default in defaults.items())
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" color="black" '
        f'width="{SIDE}" height="{SIDE}" viewBox="{box}">{icon["body"]}</svg>'
    )


def attribution(sets: dict[str, Any]) -> str:
    """Write down who drew what, under which terms."""
    lines = [
        f"{prefix}: {about['title']} by {about['author']} ({about['address']}), "
        f"{about['licence']} ({about['licence_text']}), {about['images']} images"
        for prefix, about in sets.items()
    ]
    head = (
        f"The images were rendered, {SIDE}×{SIDE} pixels, in black, from these icon sets, which @iconify/json collects:"
    )
    return "\n".join([head, "", *lines, ""])


def _contents(file: Path, sets: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name, content and usable icons of each set, one by one: all together they are half a gigabyte."""
    for match, data in matching(file, _SET):
        if match[1] not in sets:
            continue
        content = json.loads(data)
        icons = {
            icon: drawing
            for icon, drawing in sorted(content["icons"].items())
            # Hidden icons were replaced by others of the set; animated ones begin with an empty picture.
            if not drawing.get("hidden") and "<animate" not in drawing["body"]
        }
        yield match[1], content, icons


def _report(job: Job, before: int, total: int, count: int) -> None:
    job.report("rendering", before + count, total, "images")


def _part(job: Job, prefix: str) -> Path:
    return job.scratch / f"{prefix}.npy"


def _render(drawings: list[str], part: Path, progress: Callable[[int], None]) -> None:
    """Render drawings into a file that appears when it is complete; what cannot be rendered stays white."""
    pixels = np.full((len(drawings), SIDE, SIDE), 255, np.uint8)
    for index, drawing in enumerate(drawings):
        picture = render(drawing, SIDE)
        if picture is not None:
            pixels[index] = picture[:, :, 0]
        if index % 100 == 0:
            progress(index)
    with atomic(part) as file:
        np.save(file, pixels)


def _about(about: dict[str, Any], prefix: str, images: int) -> dict[str, Any]:
    author, licence = about["author"], about["license"]
    return {
        "title": about["name"],
        "author": author["name"],
        "address": author.get("url", ""),
        "licence": licence["spdx"],
        "licence_text": licence.get("url", ""),
        "split": "test" if prefix in TEST_SETS else "train",
        "images": images,
    }


def class_names(icons: Sequence[str], prefixes: Iterable[str] = (), suffixes: Iterable[str] = ()) -> dict[str, str]:
    """Return the class of every icon of a set; `prefixes` and `suffixes` are the styles that it declares."""
    declared = {icon: _without_declared(icon, prefixes, suffixes).split("-") for icon in icons}
    least = max(STYLE_FEWEST, STYLE_SHARE * len(icons))
    endings, beginnings = (
        {
            word
            for word, count in Counter(words[at] for words in declared.values() if len(words) > 1).items()
            if count >= least
        }
        for at in (-1, 0)
    )
    return {icon: _without(words, endings & ENDINGS, beginnings & BEGINNINGS) for icon, words in declared.items()}


def _without_declared(name: str, prefixes: Iterable[str], suffixes: Iterable[str]) -> str:
    for prefix in sorted(prefixes, key=len, reverse=True):
        if prefix and name.startswith(f"{prefix}-"):
            name = name.removeprefix(f"{prefix}-")
            break
    for suffix in sorted(suffixes, key=len, reverse=True):
        if suffix and name.endswith(f"-{suffix}"):
            return name.removesuffix(f"-{suffix}")
    return name


def _without(words: list[str], endings: set[str], beginnings: set[str]) -> str:
    if len(words) > 1 and words[0] in beginnings:
        words = words[1:]
    end = len(words)
    while end > 1 and (words[end - 1] in endings or _NUMBER.fullmatch(words[end - 1])):
        end -= 1
    return "-".join(words[:end])


# Drawings, which emoji are too: rendered on white by resvg, and without duplicates.


def made_with() -> str:
    """Return the renderer and the kind of machine: with the same ones, the same drawing gives the same pixels."""
    return f"resvg-py {version('resvg-py')}, {platform.machine()}"


def render(svg: str, side: int) -> npt.NDArray[np.uint8] | None:
    """Render a drawing as [side, side, 3] pixels, fitted into the square; None if it cannot be rendered."""
    try:
        # Without the machine's fonts, so that the pixels do not depend on which it has.
        png = import_module("resvg_py").svg_to_bytes(svg_string=svg, width=side, height=side, skip_system_fonts=True)
    except ValueError:  # not well formed, or of no size
        return None
    return on_white(pixels(png), side)


def on_white(picture: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """Centre an RGBA picture on a white square; a row or column too many (as in 32×33) is cut off."""
    picture = picture[:side, :side]
    height, width = picture.shape[:2]
    alpha = picture[:, :, 3:].astype(np.uint16)
    blended = (picture[:, :, :3] * alpha + 255 * (255 - alpha) + 127) // 255
    top, left = (side - height) // 2, (side - width) // 2
    square = np.full((side, side, 3), 255, np.uint8)
    square[top : top + height, left : left + width] = blended
    return square


def pixels(png: bytes) -> npt.NDArray[np.uint8]:
    """Decode a PNG file into RGBA pixels, [H, W, 4]."""
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=["PNG"]) as picture:
        return np.asarray(picture.convert("RGBA"))


def usable(
    images: npt.NDArray[Any], names: npt.NDArray[Any], testing: npt.NDArray[Any], *, least: int, train: int, test: int
) -> npt.NDArray[np.int64]:
    """Return which images to keep: no blank ones, none twice in a class, no test image that is a training image.

    A class needs `least` images, of which so many are to train on and so many to test with. Training images come first.
    """
    seen: set[tuple[bytes, str]] = set()
    trained: set[bytes] = set()
    keep = []
    for index, image in enumerate(images):
        bitmap, name = hashlib.sha256(image.tobytes()).digest(), str(names[index])
        if image.min() < 255 and (bitmap, name) not in seen and not (testing[index] and bitmap in trained):
            keep.append(index)
        seen.add((bitmap, name))
        if not testing[index]:
            trained.add(bitmap)
    kept = np.array(keep, np.int64)
    _, labels = np.unique(names[kept], return_inverse=True)
    total, tests = np.bincount(labels), np.bincount(labels, testing[kept])
    enough = (total >= least) & (total - tests >= train) & (tests >= test)
    return kept[enough[labels]]
