"""What was found, in words: the first things that the page says, made of nothing but the results."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nomax.report.results import Story
from nomax.report.section import Judged
from nomax.study.claims import CLAIMS

VERDICTS = ("reproduced", "contradicted", "undecided")


@dataclass(frozen=True)
class Group:
    """Claims that belong together."""

    title: str
    tally: str
    decided: list[Judged]
    undecided: list[Judged]


def headline(verdicts: Sequence[Judged]) -> str:
    """How the claims fared, in a sentence."""
    if not verdicts:
        return "No verdict has been reached yet."
    counted = Counter[str](judged.verdict.verdict for judged in verdicts)
    spoken = {"reproduced": "was were", "contradicted": "was were", "undecided": "is are"}
    parts = [
        f"{counted[name]} {verbs.split()[counted[name] != 1]} {name}" for name, verbs in spoken.items() if counted[name]
    ]
    return f"Of {len(verdicts)} claim{'s' * (len(verdicts) != 1)}, {listed(parts)}."


def scale(stories: Iterable[Story]) -> str:
    """What was trained on what, over all studies: verdicts hold for that alone."""
    models: dict[str, dict[str, None]] = {}
    for story in stories:
        setup = story.setup
        sizes = setup.get("models") or ([f"{setup['dim']}-wide transformers"] if "dim" in setup else [])
        if isinstance(setup.get("data"), str) and isinstance(sizes, list):
            models.setdefault(setup["data"], {}).update(dict.fromkeys(map(str, sizes)))
    return "; ".join(f"{listed(list(sizes))} on {data}" for data, sizes in models.items() if sizes)


def groups(verdicts: Sequence[Judged]) -> list[Group]:
    """The verdicts by where their claims come from; in each group, what was decided comes first."""
    found: dict[str, list[Judged]] = {}
    for judged in verdicts:
        found.setdefault(_source(judged.verdict.claim), []).append(judged)
    return [
        Group(
            title,
            ", ".join(f"{count} {name}" for name in VERDICTS if (count := len(_of(members, name)))),
            [*_of(members, "reproduced"), *_of(members, "contradicted")],
            _of(members, "undecided"),
        )
        for title, members in found.items()
    ]


def listed(parts: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def _of(verdicts: Sequence[Judged], name: str) -> list[Judged]:
    return [judged for judged in verdicts if judged.verdict.verdict == name]


def _source(claim: str) -> str:
    """The paper that a claim is from."""
    source = CLAIMS[claim].source.partition(",")[0] if claim in CLAIMS else "other claims"
    return source[0].upper() + source[1:]
