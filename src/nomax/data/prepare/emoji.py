"""Emoji in seven open drawings each: a small set for few-shot probes.

A class is one of Unicode's subgroups (face-smiling, animal-bird, food-fruit …). A quarter of a subgroup's emoji, drawn
by lot, are for testing, in all their drawings; those that differ only in a person's gender or direction stay together.
"""

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nomax._files import write
from nomax.data.prepare.icons import made_with, on_white, pixels, render, usable
from nomax.data.prepare.packages import Job, members

SIDE = 32
TEST_SHARE = 0.25
FEWEST = 10  # training images of a class: enough for ten shots
# The drawings by their authors and licences. Apple's and Facebook's, which are in the first package too, are not open,
# and Twitter's there are the ones of @twemoji/svg in another form.
DRAWINGS = {
    "google": ("emoji-datasource", "Noto Emoji by Google", "Apache-2.0"),
    "twemoji": ("@twemoji/svg", "Twemoji by Twitter and contributors", "CC-BY-4.0"),
    "openmoji-color": ("openmoji", "OpenMoji by its contributors, in colours", "CC-BY-SA-4.0"),
    "openmoji-black": ("openmoji", "OpenMoji by its contributors, in black", "CC-BY-SA-4.0"),
    "fluent-modern": ("fluentui-emoji", "Fluent Emoji by Microsoft, with shades", "MIT"),
    "fluent-flat": ("fluentui-emoji", "Fluent Emoji by Microsoft, flat", "MIT"),
    "fluent-high-contrast": ("fluentui-emoji", "Fluent Emoji by Microsoft, high contrast", "MIT"),
}
_SHEET = "package/img/google/sheets/32.png"
_CELL = 34  # a picture of 32 pixels and a border of one
_PERSONS = {"man", "woman", "men", "women", "person", "people", "boy", "girl", "adult", "child"}


def prepare(job: Job) -> dict[str, Any]:
    """Collect and render the drawings, and divide the emoji into those to train on and those to test with."""
    table, names = _tables(job)
    testing = _testing(table, names)
    drawings: dict[tuple[int, str], npt.NDArray[np.uint8]] = {}
    total = len(table) * len(DRAWINGS)
    for key, image in _images(job, table, names):
        drawings.setdefault(key, image)
        if len(drawings) % 50 == 0:
            job.report("rendering", len(drawings), total, "images")
    job.report("rendering", total, total, "images")

    order = sorted(drawings, key=lambda key: (testing[key[0]], *key))
    images = np.stack([drawings[key] for key in order])
    groups = np.array([table[emoji]["subcategory"] for emoji, _ in order])
    for_test = np.array([testing[emoji] for emoji, _ in order])
    kept = usable(images, groups, for_test, least=FEWEST, train=FEWEST, test=1)
    classes, labels = np.unique(groups[kept], return_inverse=True)
    job.write_images(images[kept], labels)
    train = int((~for_test[kept]).sum())
    write(job.folder / "ATTRIBUTION.txt", _attribution())
    return {
        "classes": classes.tolist(),
        "splits": {"train": (0, train), "test": (train, len(kept))},
        "emoji": {"train": testing.count(False), "test": testing.count(True)},
        "drawings": {style: f"{title}, {licence}" for style, (_, title, licence) in DRAWINGS.items()},
        "made_with": made_with(),
    }


def family(name: str) -> str:
    """Return the name of an emoji without the person's gender and direction: emoji that share it look alike."""
    words = re.findall(r"[\w’]+", name.lower().removesuffix(" facing right"))
    return " ".join(word for word in words if word not in _PERSONS)


def file_name(name: str) -> str:
    """Return the name of an emoji as Fluent Emoji's files have it."""
    plain = unicodedata.normalize("NFKD", re.sub("[’'“”!.]", "", name.lower().replace("&", "and")))
    return re.sub("[^a-z0-9]+", "-", "".join(c for c in plain if not unicodedata.combining(c))).strip("-")


def _tables(job: Job) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the known facts about every emoji, in a fixed order, and Unicode's short name for each."""
    ((_, listed),) = members(job.packages["emoji-datasource"], lambda name: name == "package/emoji.json")
    ((_, annotated),) = members(job.packages["openmoji"], lambda name: name == "package/data/openmoji.json")
    annotations = {row["hexcode"]: row["annotation"] for row in json.loads(annotated)}
    table = [row for row in json.loads(listed) if row["category"] != "Component"]
    table.sort(key=lambda row: row["sort_order"])
    names = [next((annotations[c] for c in _codes(row) if c in annotations), row["name"]) for row in table]
    return table, names


def _codes(row: dict[str, Any]) -> list[str]:
    """Return an emoji's code points in the forms that file names have: with and without the sign for "in colours"."""
    return [row["unified"], row["non_qualified"] or row["unified"], row["unified"].replace("-FE0F", "")]


def _testing(table: list[dict[str, Any]], names: list[str]) -> list[bool]:
    """Choose the emoji for testing."""
    families = [f"{row['subcategory']}: {family(name)}" for row, name in zip(table, names, strict=True)]
    of_group = defaultdict(set)
    for row, name in zip(table, families, strict=True):
        of_group[row["subcategory"]].add(name)
    chosen = set()
    for group in of_group.values():
        lots = sorted(group, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        chosen |= set(lots[: max(1, round(TEST_SHARE * len(lots)))])
    return [name in chosen for name in families]


def _images(
    job: Job, table: list[dict[str, Any]], names: list[str]
) -> Iterator[tuple[tuple[int, str], npt.NDArray[np.uint8]]]:
    """Yield every drawing with the number of its emoji and its style, as the packages hold them."""
    ((_, data),) = members(job.packages["emoji-datasource"], lambda name: name == _SHEET)
    sheet = pixels(data)
    files: dict[str, dict[str, tuple[int, str]]] = defaultdict(dict)
    for emoji, (row, name) in enumerate(zip(table, names, strict=True)):
        if row["has_img_google"]:
            left, top = row["sheet_x"] * _CELL + 1, row["sheet_y"] * _CELL + 1
            yield (emoji, "google"), on_white(sheet[top : top + SIDE, left : left + SIDE], SIDE)
        for code in _codes(row):
            files["@twemoji/svg"][f"package/{code.lower().removeprefix('00')}.svg"] = (emoji, "twemoji")
            for colour in ("color", "black"):
                files["openmoji"][f"package/{colour}/svg/{code}.svg"] = (emoji, f"openmoji-{colour}")
        for style in ("modern", "flat", "high-contrast"):
            for ending in ("", "-default"):  # where there are skin tones, this one is yellow
                path = f"package/icons/{style}/{file_name(name)}{ending}.svg"
                files["fluentui-emoji"][path] = (emoji, f"fluent-{style}")
    for package, wanted in files.items():
        for path, drawing in members(job.packages[package], wanted.__contains__):
            image = render(drawing.decode(), SIDE)
            if image is not None:
                yield wanted[path], image


def _attribution() -> str:
    lines = [f"{title}, {licence}, from the package {package}" for package, title, licence in DRAWINGS.values()]
    return "\n".join(["The images were rendered, at 32×32 pixels and on white, from these drawings:", "", *lines, ""])
