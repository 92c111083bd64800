"""Choose the icon sets whose images are test images: prints nomax.data.prepare.icons.TEST_SETS.

    python tools/choose_icon_test_sets.py iconify-json-2.2.535.tgz WORK_FOLDER

The argument is the package that `nomax data get icons` reads (`--keep` keeps it); WORK_FOLDER holds the rendered sets.

Sets belong to one family if they have an author in common, or if one shows copies of the other's drawings (versions of
a set, forks, collections of trademarks): at least 10 classes, and at least a tenth of the smaller set's, in which both
have pictures whose correlation is above 0.97. Families with 100 images to 2 % of all images are drawn by lot, in the
order of the SHA-256 of their first set's name, as long as they fit into 8 % of all images.
"""

import hashlib
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from nomax.data.prepare import icons
from nomax.data.prepare.packages import Job

SHARE, LARGEST, SMALLEST = 0.08, 0.02, 100
ALIKE, COPIED_SHARE, COPIED = 0.97, 0.1, 10


def main() -> None:
    file, work = Path(sys.argv[1]), Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    sets = icons.collections(file)
    wanted = icons.choose(file, sets)
    job = Job("icons", {"@iconify/json": file}, work, work, report)
    icons.render_all(job, file, sets, wanted)
    sizes = {prefix: len(chosen) for prefix, chosen in wanted.items() if chosen}
    families = find_families(sets, {prefix: wanted[prefix] for prefix in sizes}, work)
    total, taken, chosen = sum(sizes.values()), 0, []
    for family in sorted(families, key=lambda family: hashlib.sha256(family[0].encode()).hexdigest()):
        size = sum(sizes[prefix] for prefix in family)
        if SMALLEST <= size <= LARGEST * total and taken + size <= SHARE * total:
            chosen += family
            taken += size
    print(f"{len(families)} families of {len(sizes)} sets; {taken:,} of {total:,} images:", file=sys.stderr)
    print(" ".join(sorted(chosen)))


def find_families(sets: dict, wanted: dict, work: Path) -> list[list[str]]:
    leader = {prefix: prefix for prefix in wanted}

    def first(prefix: str) -> str:
        return prefix if leader[prefix] == prefix else first(leader[prefix])

    def join(one: str, other: str) -> None:
        one, other = sorted((first(one), first(other)))
        leader[other] = one

    by_author: dict[str, str] = {}
    for prefix in wanted:
        join(prefix, by_author.setdefault(sets[prefix]["author"]["name"], prefix))
    for (one, other), classes in copies(wanted, work).items():
        if len(classes) >= max(COPIED, COPIED_SHARE * min(len(set(wanted[p].values())) for p in (one, other))):
            join(one, other)
    families = defaultdict(list)
    for prefix in sorted(wanted):
        families[first(prefix)].append(prefix)
    return list(families.values())


def copies(wanted: dict, work: Path) -> dict[tuple[str, str], set[str]]:
    """The classes in which two sets have nearly the same picture."""
    members = defaultdict(list)
    pictures = {prefix: np.load(work / f"{prefix}.npy") for prefix in wanted}
    for prefix, chosen in wanted.items():
        for index, name in enumerate(chosen.values()):
            members[name].append((prefix, index))
    found = defaultdict(set)
    for name, places in members.items():
        flat = np.stack([pictures[prefix][index].ravel() for prefix, index in places]).astype(np.float64)
        flat -= flat.mean(1, keepdims=True)
        flat /= np.linalg.norm(flat, axis=1, keepdims=True) + 1e-9
        for one, other in np.argwhere(np.triu(flat @ flat.T > ALIKE, 1)):
            pair = tuple(sorted((places[one][0], places[other][0])))
            if pair[0] != pair[1]:
                found[pair].add(name)
    return found


def report(step: str, done: int, total: int, unit: str) -> None:
    print(f"\r{step} {done:,} of {total:,}", end="", file=sys.stderr)


if __name__ == "__main__":
    main()
