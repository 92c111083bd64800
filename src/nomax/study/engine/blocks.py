"""Which blocks of a long cache could be skipped: their weights are all zero, and a bound on their scores says so.

relu(s + shift) is zero for a whole block of keys if no score of it exceeds −shift. A query q need not read a block if
an upper bound on its scores does not either:

box   Σ_c max(q_c · least_c, q_c · most_c), by the least and most of each channel over the block
ball  q · centre + |q| · radius

Keys in the order of the text are one long cache, as if many documents were one. They are also sorted along their first
principal direction, and halved across it again and again until 16 are left, so that a block holds keys that are alike.
What the sorting costs is not counted: it favours skipping.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from nomax.data import Source
from nomax.data.images.batches import evaluation_batches
from nomax.data.text import Corpus
from nomax.data.text.batches import pad
from nomax.evaluate import TrainedImageModel, TrainedTextModel
from nomax.models import ReLUFormer, ViT
from nomax.nn import Attention
from nomax.ops.api import attention
from nomax.ops.length import constants
from nomax.phi import Phi
from nomax.study.engine.experiment import cpu_seconds
from nomax.train.console import Stop
from nomax.train.text import data as text_data

_Batches = Iterable[tuple[tuple[Tensor, ...], Tensor]]  # inputs, and which tokens count
_Projections = list[tuple[Tensor, ...]]  # queries, keys and values by layer

LENGTHS = (8192, 65_536)
LONG = (524_288,)
SIZES = (16, 64, 256)  # keys of a block
BOUNDS = ("box", "ball")
QUERIES = 32  # of the test text, spread evenly; of each layer and head
TIMED = 2  # of them
ROUNDS = 3
POWERS = 3  # rounds that find a principal direction
BATCH = 16  # stretches of text


class Cache(NamedTuple):
    """What one head sees: queries [Q, D], keys and values [N, D]. `shift` is what φ and the layer add to scores."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    shift: float


class Way(NamedTuple):
    """One way to skip: blocks of so many keys, and a bound."""

    size: int
    bound: str


WAYS = tuple(Way(size, bound) for size in SIZES for bound in BOUNDS)


@torch.inference_mode()
def text_blocks(trained: TrainedTextModel, corpus: Corpus, lengths: Sequence[int] = LENGTHS) -> dict[str, float]:
    """Look at a cache of the training text, with queries of a corpus. See `_blocks` for what is returned."""
    train = text_data.of_run(trained.config, "train")
    attentions = [cast(Attention, layer.attention) for layer in trained.model.decoder]
    return _blocks(trained.model, attentions, _texts(trained, corpus), _texts(trained, train), lengths)


@torch.inference_mode()
def image_blocks(trained: TrainedImageModel, test: Source, lengths: Sequence[int] = LENGTHS[:1]) -> dict[str, float]:
    """Look at a cache of many test images, with queries of the first ones. See `_blocks` for what is returned."""
    attentions = [cast(Attention, block.get_submodule("attention")) for block in trained.model.blocks]
    return _blocks(trained.model, attentions, _images(trained, test), _images(trained, test), lengths)


def _blocks(
    model: ViT | ReLUFormer, attentions: Sequence[Attention], asked: _Batches, cached: _Batches, lengths: Sequence[int]
) -> dict[str, float]:
    """Return shares of blocks, and seconds of CPU time for one query and head: means over all layers and heads.

    N is a number of keys; lengths for which there is too little data are left out.

    cache_zeros N: the weights that are exactly zero.
    dense_seconds N: attention over all keys.
    ORDER SIZE zero N: the blocks whose weights are all zero. ORDER SIZE BOUND N: those that a bound can skip.
    ORDER bound_seconds N, left_seconds N, copied_seconds N: the bound and which blocks it leaves; attention over these,
        as if they lay together; and with copying them together first. Of the way that reads least:
    ORDER size N, ORDER box N: its block and whether its bound is the box.
    """
    phi = Phi.parse(model.config.phi)
    if phi.activation not in ("relu", "relu2"):
        raise ValueError(f"phi={model.config.phi!r}: only relu and relu2 have zeros to skip.")
    heads = list(
        _heads(
            attentions,
            _projected(model, attentions, asked, QUERIES * BATCH),
            _projected(model, attentions, cached, max(lengths)),
        )
    )
    results: dict[str, float] = {}
    for count in lengths:
        if count <= len(heads[0].keys):
            found = skipping([_first(head, count, phi) for head in heads], phi)
            results |= {f"{name} {count}": value for name, value in found.items()}
    return results


def skipping(caches: Sequence[Cache], phi: Phi) -> dict[str, float]:
    """Return the shares and the seconds of these caches, by name."""
    places = [{order: place(cache.keys) for order, place in ORDERS.items()} for cache in caches]
    zeros = [_share(cache.queries @ cache.keys.mT, cache.shift) for cache in caches]
    results = {"cache_zeros": fmean(zeros)}
    chosen: dict[str, Way] = {}
    for order in ORDERS:
        each = [_shares(cache, place[order]) for cache, place in zip(caches, places, strict=True)]
        shares = {name: fmean(share[name] for share in each) for name in each[0]}
        results |= {f"{order} {name}": share for name, share in shares.items()}
        costs = {way: reading(way, shares[f"{way.size} {way.bound}"], caches[0].keys.shape[1]) for way in WAYS}
        chosen[order] = min(costs, key=lambda way: costs[way])
        results |= {f"{order} size": float(chosen[order].size), f"{order} box": float(chosen[order].bound == "box")}
    both = zip(caches, places, strict=True)
    seconds = [times for cache, place in both for times in _times(cache, place, phi, chosen)]
    return results | {name: fmean(each[name] for each in seconds) for name in seconds[0]}


def reading(way: Way, skipped: float, dimension: int) -> float:
    """Return the numbers that a query reads, as a share of all keys and values."""
    return (1 - skipped) + (2 * dimension if way.bound == "box" else dimension + 1) / (2 * dimension * way.size)


def principal(keys: Tensor) -> Tensor:
    """Return the order of keys [N, D] along their first principal direction."""
    return _along(keys.unsqueeze(0)).flatten()


def halved(keys: Tensor) -> Tensor:
    """Return the order of keys [N, D] that comes of halving them across their principal direction again and again."""
    order = torch.arange(len(keys))
    while order.shape[-1] > min(SIZES):
        groups = order.view(-1, order.shape[-1])
        order = groups.gather(1, _along(keys[groups])).view(2 * len(groups), -1)
    return order.flatten()


ORDERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "text": lambda keys: torch.arange(len(keys)),
    "principal": principal,
    "halved": halved,
}


def _along(keys: Tensor) -> Tensor:
    """Return the order of each group of keys [groups, N, D] along its principal direction."""
    centred = keys - keys.mean(1, keepdim=True)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(len(keys), keys.shape[2], 1, generator=generator).to(keys)
    for _ in range(POWERS):
        direction = torch.nn.functional.normalize(centred.mT @ (centred @ direction), dim=1)
    return (centred @ direction).squeeze(2).argsort(1)


@dataclass(frozen=True)
class Bounds:
    """What is kept of each block, so that a product with what `query` makes of a query bounds its scores."""

    table: Tensor
    """[blocks, 2·D] for boxes, [blocks, D + 1] for balls"""
    bound: str

    @classmethod
    def of(cls, keys: Tensor, way: Way) -> "Bounds":
        """Return the bounds of keys [N, D] in blocks."""
        grouped = keys.view(-1, way.size, keys.shape[1])
        if way.bound == "box":
            return cls(torch.cat([grouped.amax(1), grouped.amin(1)], 1), way.bound)
        centre = grouped.mean(1)
        radius = (grouped - centre.unsqueeze(1)).norm(dim=2).amax(1, keepdim=True)
        return cls(torch.cat([centre, radius], 1), way.bound)

    def of_scores(self, queries: Tensor) -> Tensor:
        """Return a bound on the scores of each block, [Q, blocks], for queries [Q, D]."""
        if self.bound == "box":
            parts = torch.cat([queries.clamp(min=0), queries.clamp(max=0)], 1)
        else:
            parts = torch.cat([queries, queries.norm(dim=1, keepdim=True)], 1)
        return parts @ self.table.mT


def _shares(cache: Cache, order: Tensor) -> dict[str, float]:
    """Return the shares of blocks that are all zero, and that each bound can skip."""
    keys = cache.keys[order]
    scores = cache.queries @ keys.mT
    shares: dict[str, float] = {}
    for size in SIZES:
        largest = scores.view(len(scores), -1, size).amax(2)
        shares[f"{size} zero"] = _share(largest, cache.shift)
        for bound in BOUNDS:
            limits = Bounds.of(keys, Way(size, bound)).of_scores(cache.queries)
            shares[f"{size} {bound}"] = _share(limits, cache.shift)
    return shares


def _share(scores: Tensor, shift: float) -> float:
    return float((scores + shift <= 0).double().mean())


def _times(cache: Cache, places: Mapping[str, Tensor], phi: Phi, ways: Mapping[str, Way]) -> Iterator[dict[str, float]]:
    """Yield, for some queries, the median seconds of attention over all keys, and of each way to skip."""
    own = Phi(phi.activation, shift=cache.shift)  # a factor of rows takes no time
    ordered = {order: (cache.keys[places[order]], cache.values[places[order]]) for order in ways}
    bounds = {order: Bounds.of(ordered[order][0], way) for order, way in ways.items()}
    for number in torch.linspace(0, len(cache.queries) - 1, TIMED).long().tolist():
        query = cache.queries[number : number + 1]
        calls: dict[str, Callable[[], object]] = {
            "dense_seconds": partial(_attend, query, cache.keys, cache.values, own)
        }
        for order, way in ways.items():
            choose = partial(_left, bounds[order], query, cache.shift)
            left = choose()
            keys, values = copied(ordered[order], left, way)
            calls[f"{order} bound_seconds"] = choose
            calls[f"{order} left_seconds"] = partial(_attend, query, keys, values, own)
            calls[f"{order} copied_seconds"] = partial(_attend_copied, query, ordered[order], left, way, own)
        seconds = cpu_seconds(calls, ROUNDS, Stop())
        yield {name: median(times) for name, times in (seconds or {}).items()}


def _left(bounds: Bounds, query: Tensor, shift: float) -> Tensor:
    """Return the blocks that a query must read."""
    return (bounds.of_scores(query)[0] > -shift).nonzero().flatten()


def copied(tensors: Sequence[Tensor], left: Tensor, way: Way) -> list[Tensor]:
    """Return the keys and the values, [N, D] each, of these blocks."""
    blocks = [x.view(-1, way.size * x.shape[1]).index_select(0, left) for x in tensors]
    return [x.view(-1, whole.shape[1]) for x, whole in zip(blocks, tensors, strict=True)]


def _attend_copied(query: Tensor, tensors: Sequence[Tensor], left: Tensor, way: Way, phi: Phi) -> Tensor | None:
    keys, values = copied(tensors, left, way)
    return _attend(query, keys, values, phi)


def _attend(query: Tensor, keys: Tensor, values: Tensor, phi: Phi) -> Tensor | None:
    """Attend from one query, which has been multiplied by the scale already."""
    if not len(keys):
        return None
    return attention(query[None, None], keys[None, None], values[None, None], phi=phi, scale=1.0)


class _Head(NamedTuple):
    """Queries, keys and values of one head, and the shift that its layer has learned."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    learned: float


def _first(head: _Head, count: int, phi: Phi) -> Cache:
    """Return a cache of the first keys, with the shift that φ has over so many."""
    return Cache(head.queries, head.keys[:count], head.values[:count], head.learned + constants(phi, count)[1])


def _heads(attentions: Sequence[Attention], asked: _Projections, cached: _Projections) -> Iterator[_Head]:
    """Yield the heads of all layers: queries of one text or set of images, and keys and values of another."""
    for module, (queries, _, _), (_, keys, values) in zip(attentions, asked, cached, strict=True):
        places = torch.linspace(0, queries.shape[1] - 1, QUERIES).long()
        for head in range(module.heads):
            learned = 0.0 if module.shift is None else float(module.shift.expand(module.heads)[head])
            scaled = queries[head, places] * queries.shape[2] ** -0.5
            yield _Head(scaled, keys[head].contiguous(), values[head].contiguous(), learned)


def _projected(model: nn.Module, attentions: Sequence[Attention], batches: _Batches, count: int) -> _Projections:
    """Return the queries, keys and values of the first tokens, [heads, count, D] each, for every layer."""
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in attentions]
    shown: list[Tensor] = []

    def look(layer: int, module: Attention, given: tuple[Tensor, ...], settings: object) -> None:
        projected = module._project(given[0], None, None)
        found[layer].append(tuple(x.transpose(1, 2)[shown[0]].transpose(0, 1) for x in projected))

    with ExitStack() as stack:
        for layer, module in enumerate(attentions):
            stack.callback(module.register_forward_pre_hook(partial(look, layer), with_kwargs=True).remove)
        done = 0
        for inputs, tokens in batches:
            shown[:] = [tokens]
            model(*inputs)
            done += int(tokens.sum())
            if done >= count:
                break
    return [tuple(torch.cat(parts, 1)[:, :count] for parts in zip(*each, strict=True)) for each in found]


def _texts(trained: TrainedTextModel, corpus: Corpus) -> _Batches:
    """Yield batches of a corpus, as the model is trained on them, and which tokens are none of padding."""
    model, config = trained.model, trained.model.config
    texts = text_data.examples(trained.config, corpus, trained.tokenizer)
    for first in range(0, len(texts), BATCH):
        some, device = texts[first : first + BATCH], model.embedding.weight.device
        target = pad([[config.begin, *text.target][: config.max_length] for text in some], device)
        sources = [pad([[*text.source, config.end] for text in some], device)] if trained.translates else []
        yield (*sources, target), target != config.padding


def _images(trained: TrainedImageModel, source: Source) -> _Batches:
    """Yield batches of images, and that all of their tokens count."""
    with evaluation_batches(source, trained.transform, BATCH) as batches:
        for images, _ in batches:
            yield (images,), torch.ones(len(images), trained.model.config.tokens, dtype=torch.bool)
