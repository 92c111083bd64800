"""A cache of keys and values, for decoding token by token."""

import torch
from torch import Tensor


class KeyValueCache:
    """Keep the keys and values of all positions so far for one Attention; each layer needs its own.

    The capacity doubles when it is full instead of being fixed in advance: the final length need not be known, each
    position is copied about once on average, and at most half of the room is empty. `capacity` is the initial one; if
    it is the final length, nothing is ever copied.
    """

    def __init__(self, capacity: int = 0) -> None:
        if capacity < 0:
            raise ValueError(f"capacity={capacity!r} must be a number of positions, at least 0.")
        self.capacity = capacity
        self.length = 0
        # [2, batch, heads, capacity, head dimension]: the positions of a head are contiguous.
        self._room: Tensor | None = None

    def __repr__(self) -> str:
        return f"KeyValueCache({self.length} positions, room for {self.capacity})"

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [batch, heads, new positions, head dimension], and return those of all positions."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError(
                "a key-value cache is for decoding and keeps no gradients. Decode under torch.no_grad() or "
                "torch.inference_mode(), or train on whole sequences, without a cache."
            )
        batch, heads, new, dimension = key.shape
        room = self._room
        if room is not None and (*room.shape[1:3], room.shape[4]) != (batch, heads, dimension):
            raise ValueError(
                f"the cache holds keys of {room.shape[1]} sequences × {room.shape[2]} heads × {room.shape[4]}, but the "
                f"new ones are of {batch} × {heads} × {dimension}. Use one cache per layer and batch, and call "
                "reorder when the batch is rearranged."
            )
        end = self.length + new
        if room is None or end > self.capacity:
            self.capacity = max(end, self.capacity if room is None else 2 * self.capacity)
            larger = key.new_empty(2, batch, heads, self.capacity, dimension)
            if room is not None:
                larger[:, :, :, : self.length] = room[:, :, :, : self.length]
            self._room = room = larger
        room[0, :, :, self.length : end] = key
        room[1, :, :, self.length : end] = value
        self.length = end
        return self.entries()

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of all positions, [batch, heads, positions, head dimension] each, as views."""
        if self._room is None:
            raise RuntimeError("the cache is empty: nothing was appended to it yet.")
        key, value = self._room[:, :, :, : self.length].unbind(0)
        return key, value

    def reorder(self, indices: Tensor) -> None:
        """Make sequence i continue the former sequence indices[i], for beam search; their number may change."""
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indices must be a one-dimensional int32 or int64 tensor, got {indices.dtype} {list(indices.shape)}."
            )
        if self._room is not None:
            self._room = self._room.index_select(1, indices)

    def keep(self, places: Tensor) -> None:
        """Keep only the positions given by places [batch, fewer], in that order; the capacity stays the same."""
        if self._room is None:
            raise RuntimeError("the cache is empty: nothing was appended to it yet.")
        two, batch, heads, capacity, dimension = self._room.shape
        if places.dim() != 2 or len(places) != batch or places.shape[1] > self.length:
            raise ValueError(f"places must be [{batch}, at most {self.length}], got {list(places.shape)}.")
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < self.length:
            raise ValueError(f"places must be from 0 to {self.length - 1}, the positions that the cache holds.")
        first = torch.arange(0, two * batch * heads * capacity, capacity, device=places.device)
        rows = first.view(two, batch, heads, 1) + places[:, None]
        self.length = places.shape[1]
        kept = self._room.view(-1, dimension).index_select(0, rows.flatten())
        self._room[:, :, :, : self.length] = kept.view(two, batch, heads, -1, dimension)
