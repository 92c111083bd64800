"""Batches of examples, padded: the same for every number of ranks together, from any step on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from nomax.data.text.examples import Example
from nomax.data.text.order import TokenOrder
from nomax.data.text.tokenizer import BEGIN, END, PADDING


@dataclass(frozen=True)
class TextBatch:
    """One rank's share of the examples of a step, padded with 0."""

    step: int
    source: Tensor | None  # int64 [B, S]: tokens, end; None for a language model
    target: Tensor  # int64 [B, T+1]: begin, tokens, end; the model sees [:, :-1] and learns [:, 1:]
    numbers: tuple[int, ...]
    """Which examples these are."""
    tokens: int
    """Target tokens that are learned at this step, over all ranks: what to divide summed losses by."""


def batches(
    examples: Sequence[Example],
    order: TokenOrder,
    start: int = 0,
    rank: int = 0,
    world: int = 1,
    *,
    device: torch.device | str = "cpu",
) -> Iterator[TextBatch]:
    """The batches of a training run from step `start` on, without end."""
    if len(order) != len(examples):
        raise ValueError(f"the order is for {len(order):,} examples, but there are {len(examples):,}.")
    order.batch(start, rank, world)  # says now what is wrong with them

    def made() -> Iterator[TextBatch]:
        for step in count(start):
            everyone = order.batch(step)
            tokens = sum(len(examples[number].target) + 1 for number in everyone)
            yield _batch(examples, [int(number) for number in everyone[rank::world]], step, tokens, device)

    return made()


def evaluation_batches(
    examples: Sequence[Example], tokens_per_batch: int, *, device: torch.device | str = "cpu"
) -> Iterator[TextBatch]:
    """Every example once, the longest first; `numbers` says which they are, to put results back into their order."""
    order = TokenOrder([example.length for example in examples], tokens_per_batch, shuffle=False)
    for step in range(order.steps_per_epoch):
        numbers = [int(number) for number in order.batch(step)]
        yield _batch(examples, numbers, step, sum(len(examples[n].target) + 1 for n in numbers), device)


def pad(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Rows of tokens as one tensor [rows, longest], filled up with 0."""
    padded = torch.full((len(rows), max(map(len, rows), default=0)), PADDING, dtype=torch.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return padded.to(device)


def _batch(
    examples: Sequence[Example], numbers: list[int], step: int, tokens: int, device: torch.device | str
) -> TextBatch:
    chosen = [examples[number] for number in numbers]
    with_source = any(example.source for example in chosen)
    source = pad([[*example.source, END] for example in chosen], device) if with_source else None
    target = pad([[BEGIN, *example.target, END] for example in chosen], device)
    return TextBatch(step, source, target, tuple(numbers), tokens)
