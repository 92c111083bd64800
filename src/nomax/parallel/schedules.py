"""The two schedules: who sends what to whom, and what each rank computes meanwhile.

ring     Keys and values travel from rank to rank, and partial sums stay. While a block is computed, the next one is on
         its way. In the backward pass the gradients of keys and values travel one step behind them, and come home
         complete. Each rank holds no more than two ranks' keys and values.
reduce   Queries are gathered once, each rank computes what all of them get from its own keys, and partial sums are
         reduce-scattered. Keys and values never move, nor do their gradients. Each rank holds all queries and their
         partial sums. Softmax would need one more exchange here: its partial sums have different units on each rank.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from nomax.ops.problem import wide
from nomax.parallel.ranks import Arrival, Gathering, Ranks
from nomax.parallel.split_problem import GradientsOfSums, SplitProblem, Sums

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Schedule(ABC):
    """One attention among ranks."""

    ranks: Ranks
    problem: SplitProblem

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sums:
        """Return the sums of this rank's queries over the keys of all ranks."""

    @abstractmethod
    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, grads: GradientsOfSums, mask: Tensor | None
    ) -> Gradients:
        """Return the gradients of this rank's query, key and value, in at least float32.

        mask: the gradient of the mask, which is added to.
        """


class Ring(Schedule):
    """Keys and values travel, partial sums stay."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sums:
        held = Packed.of(key, value)
        ranks, sums = self.ranks, self.problem.sums(query, value)
        for step in range(ranks.size):
            owner = (ranks.rank - step) % ranks.size
            arrival = self._pass_on(held, owner) if step < ranks.size - 1 else None
            self.problem.forward(sums, query, *held.unpacked(), (ranks.rank, owner))
            if arrival is not None:
                held = held.another(arrival.wait())
        return sums

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, grads: GradientsOfSums, mask: Tensor | None
    ) -> Gradients:
        ranks, held = self.ranks, Packed.of(key, value)
        arrival = travelling = None
        for step in range(ranks.size):
            owner = (ranks.rank - step) % ranks.size
            if arrival is not None:
                held = held.another(arrival.wait())
            arrival = self._pass_on(held, owner) if step < ranks.size - 1 else None
            grad_query, *others = self.problem.backward(query, *held.unpacked(), (ranks.rank, owner), grads, mask)
            if step == 0:
                total, home = grad_query, Packed.of(*others)
                continue
            total += grad_query
            moving = Packed.of(*others)
            if travelling is not None:
                moving.flat.add_(travelling.wait())
            travelling = self._pass_on(moving, owner, tag=1)
        if travelling is not None:
            home.flat.add_(travelling.wait())
        return total, *home.unpacked()

    def _pass_on(self, held: "Packed", owner: int, tag: int = 0) -> Arrival:
        """Send on what belongs to `owner`, and receive what belongs to the rank before it."""
        size = held.numel(self.problem.keys.sizes[(owner - 1) % self.ranks.size])
        return self.ranks.pass_on(held.flat, size, tag)


class Reduce(Schedule):
    """Queries are gathered once, partial sums are reduce-scattered."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Sums:
        ranks, sizes = self.ranks, self.problem.queries.sizes
        gathering = ranks.gather(query, sizes, 2) if ranks.size > 1 else None
        sums = [self._sums(query, key, value, ranks.rank)]  # while the others' queries are on their way
        if gathering is None:
            return sums[0]
        queries = gathering.wait()
        after = [self._sums(queries[rank], key, value, rank) for rank in range(ranks.rank + 1, ranks.size)]
        sums = [self._sums(queries[rank], key, value, rank) for rank in range(ranks.rank)] + sums + after
        own = sums[ranks.rank]
        own.all = ranks.reduce_scatter([each.all for each in sums], 2)
        return own

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, grads: GradientsOfSums, mask: Tensor | None
    ) -> Gradients:
        ranks, problem = self.ranks, self.problem
        gathering = self._gather(query, grads)
        grad_query, grad_key, grad_value = problem.backward(query, key, value, (ranks.rank,) * 2, grads, mask)
        if not gathering:
            return grad_query, grad_key, grad_value
        gathered = [each.wait() for each in gathering]
        grad_queries = []
        for rank, (packed, *row_sums) in enumerate(zip(*gathered, strict=True)):
            if rank == ranks.rank:
                grad_queries.append(grad_query)
                continue
            other, grad = packed.split([query.shape[3], value.shape[3]], dim=3)
            all_grads = GradientsOfSums(grad, *row_sums)
            part, keys, values = problem.backward(other, key, value, (rank, ranks.rank), all_grads, mask)
            grad_queries.append(part)
            grad_key += keys
            grad_value += values
        return ranks.reduce_scatter(grad_queries, 2), grad_key, grad_value

    def _sums(self, query: Tensor, key: Tensor, value: Tensor, rank: int) -> Sums:
        sums = self.problem.sums(query, value)
        self.problem.forward(sums, query, key, value, (rank, self.ranks.rank))
        return sums

    def _gather(self, query: Tensor, grads: GradientsOfSums) -> list[Gathering]:
        """Gather queries with the gradients of their outputs, and then those of the sums of rows."""
        ranks, sizes = self.ranks, self.problem.queries.sizes
        if ranks.size == 1:
            return []
        gathering = [ranks.gather(torch.cat([query, grads.out], dim=3), sizes, 2)]
        if self.problem.rows:
            none = torch.zeros(query.shape[:3], dtype=wide(query), device=query.device)
            gathering += [
                ranks.gather(none if sums is None else sums, sizes, 2) for sums in (grads.row_sum, grads.row_log)
            ]
        return gathering


@dataclass(frozen=True)
class Packed:
    """Keys and values of one rank [B, H, positions, dimension] in one flat tensor, to be sent as one message."""

    flat: Tensor
    shapes: tuple[torch.Size, torch.Size]  # of other ranks' too, up to the number of positions

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> "Packed":
        return cls(torch.cat([key.flatten(), value.flatten()]), (key.shape, value.shape))

    def another(self, flat: Tensor) -> "Packed":
        """Return keys and values of another rank, which may hold more positions or fewer."""
        return Packed(flat, self.shapes)

    def numel(self, positions: int) -> int:
        """Return the size of a message of so many positions."""
        return sum(batch * heads * positions * dimension for batch, heads, _, dimension in self.shapes)

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, as views."""
        per_position = self.numel(1)
        positions = self.flat.numel() // per_position if per_position else 0
        sizes = [batch * heads * positions * dimension for batch, heads, _, dimension in self.shapes]
        key, value = self.flat.split(sizes)
        shapes = [(batch, heads, positions, dimension) for batch, heads, _, dimension in self.shapes]
        return key.view(shapes[0]), value.view(shapes[1])
