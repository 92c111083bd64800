"""`SplitProblem`: one attention whose queries and keys are split over ranks, in the blocks that a rank computes.

A block is what the queries of one rank get from the keys of one rank. Blocks of the same queries add up, since no
weight depends on another, and each has the factors and dropout's coins of the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nomax.ops import backends, length
from nomax.ops.problem import Problem, wide
from nomax.parallel.layout import Layout
from nomax.phi import Phi


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """What all ranks know of one attention, and this rank's mask."""

    phi: Phi
    queries: Layout
    keys: Layout
    scale: float
    causal: bool = False
    mask: Tensor | None = None  # [B or 1, H or 1, this rank's queries or 1, all keys or 1], the keys in their own order
    dropout: float = 0.0
    seed: Tensor | None = None
    rows: bool = False
    backend: str | None = None

    def sums(self, query: Tensor, value: Tensor) -> "Sums":
        """Return sums of some queries, all zero."""
        return Sums(query, value, self.rows)

    def forward(self, sums: "Sums", query: Tensor, key: Tensor, value: Tensor, ranks: tuple[int, int]) -> None:
        """Add to the sums what the queries of ranks[0] get from the keys of ranks[1]."""
        for part, (rows, _) in self._blocks(query, key, value, ranks):
            sums.add(rows, backends.attend_part(part, self.backend))

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ranks: tuple[int, int],
        grads: "GradientsOfSums",
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries of ranks[0], and the keys and values of ranks[1], from one another.

        mask: the gradient of the whole mask, which is added to.
        """
        totals = [torch.zeros(x.shape, dtype=wide(x), device=x.device) for x in (query, key, value)]
        columns = None if mask is None else torch.zeros_like(self._columns(mask, ranks[1]))
        for part, (rows, keys) in self._blocks(query, key, value, ranks):
            *results, bias = backends.part_gradients(
                part, *grads.of(rows), bias_wanted=columns is not None, backend=self.backend
            )
            for total, grad, bounds in zip(totals, results, (rows, keys, keys), strict=True):
                total[:, :, slice(*bounds)] += grad
            if columns is not None and bias is not None:
                within = _within(_within(columns, 2, rows), 3, keys)
                within += bias
        if mask is not None and columns is not None:
            self._add_columns(mask, columns, ranks[1])
        return totals[0], totals[1], totals[2]

    def lengths(self, rank: int, like: Tensor) -> int | Tensor:
        """Return φ's L for the queries of a rank, which counts the keys of all ranks: as `length.of` does.

        like: any tensor [B, H, that rank's queries, …]
        """
        if self.phi.length == "visible" and self.causal:
            positions = self.queries.positions(rank, like.device)
            return (positions + 1).clamp_max(self.keys.length).to(wide(like)).view(1, 1, -1)
        stand_in = like.new_empty(())  # only sizes and the mask matter
        key = stand_in.expand(1, 1, self.keys.length, 1)
        query = stand_in.expand(1, 1, like.shape[2], 1)
        return length.of(self.phi, Problem(query=query, key=key, value=key, mask=self.mask))

    def factors(self, rank: int, like: Tensor) -> Problem:
        """Return a problem with φ's factors for the queries of a rank, still without tensors."""
        none = like.new_empty(0)
        return length.scaled(self.phi, Problem(query=none, key=none, value=none), self.lengths(rank, like))

    def _blocks(
        self, query: Tensor, key: Tensor, value: Tensor, ranks: tuple[int, int]
    ) -> Iterator[tuple[Problem, tuple[tuple[int, int], tuple[int, int]]]]:
        """Yield problems that make up those of two ranks, each with its bounds among their queries and keys."""
        if not query.shape[2] or not key.shape[2]:
            return
        pair = replace(
            self.factors(ranks[0], query),
            query=query,
            key=key,
            value=value,
            mask=None if self.mask is None else self._columns(self.mask, ranks[1]),
            activation=self.phi.activation,
            scale=self.scale,
            dropout=self.dropout,
            seed=self.seed,
            rows=self.rows,
        )
        if not self.causal and not self.dropout:  # then it does not matter which positions these are
            yield pair, ((0, query.shape[2]), (0, key.shape[2]))
            return
        for rows, (first_row, last_row) in _bounds(self.queries, ranks[0]):
            for keys, (first_key, last_key) in _bounds(self.keys, ranks[1]):
                if self.causal and first_key > last_row:
                    continue
                diagonal = first_row - first_key if self.causal and last_key > first_row else None
                origin = (0, first_row, first_key)
                yield replace(pair.part(rows, keys), diagonal=diagonal, origin=origin), (rows, keys)

    def _columns(self, mask: Tensor, rank: int) -> Tensor:
        """Return the mask of the keys that a rank holds."""
        return mask if mask.shape[3] == 1 else self.keys.local(mask, rank, 3)

    def _add_columns(self, mask: Tensor, columns: Tensor, rank: int) -> None:
        if mask.shape[3] == 1:
            mask += columns
            return
        for (start, stop), (first, last) in _bounds(self.keys, rank):
            mask[..., first : last + 1] += columns[..., start:stop]


class Sums:
    """Partial sums of some queries, in at least float32: outputs, and the two sums of each row if wanted."""

    def __init__(self, query: Tensor, value: Tensor, rows: bool) -> None:
        shape, dtype = query.shape[:3], wide(query)
        # Outputs and both sums of rows in one tensor, for one reduce-scatter.
        self.all = torch.zeros(*shape, value.shape[3] + 2 * rows, dtype=dtype, device=query.device)
        self.rows = rows

    def add(self, rows: tuple[int, int], results: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add the results of a block that has these rows."""
        out, *sums = results
        all_of_rows = self.all[:, :, slice(*rows)]
        all_of_rows[..., : out.shape[3]] += out
        if self.rows:
            all_of_rows[..., -2] += sums[0]
            all_of_rows[..., -1] += sums[1]

    def results(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the output in this dtype and, if wanted, the two sums of each row."""
        if not self.rows:
            return (self.all.to(dtype),)
        return self.all[..., :-2].to(dtype), self.all[..., -2].contiguous(), self.all[..., -1].contiguous()


@dataclass(frozen=True)
class GradientsOfSums:
    """The gradients of some queries' outputs and, unless nothing depends on them, of their rows' two sums."""

    out: Tensor
    row_sum: Tensor | None = None
    row_log: Tensor | None = None

    def of(self, rows: tuple[int, int]) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return those of some rows, as `backends.gradients` takes them."""
        part = slice(*rows)
        out = self.out[:, :, part]
        if self.row_sum is None or self.row_log is None:
            return out, None
        return out, (self.row_sum[:, :, part], self.row_log[:, :, part])


def _bounds(layout: Layout, rank: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield a rank's segments: their bounds among its positions, and their first and last position in the whole."""
    start = 0
    for first, end in layout.segments[rank]:
        stop = start + end - first
        yield (start, stop), (first, end - 1)
        start = stop


def _within(x: Tensor, dim: int, bounds: tuple[int, int]) -> Tensor:
    return x if x.shape[dim] == 1 else x.narrow(dim, bounds[0], bounds[1] - bounds[0])
