"""Small corpora for the tests of text."""

import random

from nomax.data.text import Corpus, Document, Pair

NOUNS = {"house": "casa", "river": "río", "king": "rey", "bread": "pan", "night": "noche", "year": "año"}
VERBS = {"sees": "ve", "loves": "ama", "has": "tiene", "leaves": "deja"}


def corpus(documents: int = 12, pairs: int = 10, seed: int = 0) -> Corpus:
    """Sentences such as “the king sees the river”, numbered so that no two are the same."""
    draw = random.Random(seed)

    def pair(number: int) -> Pair:
        words = [draw.choice([*NOUNS.items()]) for _ in range(draw.randint(2, 9))]
        verb = draw.choice([*VERBS.items()])
        english, spanish = (" and ".join(word[side] for word in words) for side in (0, 1))
        return Pair(f"{number}: the {english} {verb[0]}.", f"{number}: {spanish} {verb[1]}.")

    return Corpus(
        tuple(
            Document(f"tale {tale}", tuple(pair(tale * pairs + number) for number in range(pairs)))
            for tale in range(documents)
        ),
        ("en", "es"),
        "tales",
    )
