"""What decoding token by token keeps of the tokens before."""

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of all positions so far, of one Attention: give each layer its own.

    Its room doubles when it is full, rather than being fixed in advance: nobody has to know how long the text will
    become, every position is copied about once on average, and at most half of the room is empty. `capacity` is where
    it starts; with the final length there, nothing is ever copied.
    """

    def __init__(self, capacity: int = 0) -> None:
        if capacity < 0:
            raise ValueError(f"capacity={capacity!r} must be a number of positions, at least 0.")
        self.capacity = capacity
        self.length = 0
        # [2, batch, capacity, heads, head dimension]: a new position is one contiguous piece per sequence.
        self._room: Tensor | None = None

    def __repr__(self) -> str:
        return f"KeyValueCache({self.length} positions, room for {self.capacity})"

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values [batch, heads, new positions, head dimension], and return those of all positions."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError(
                "a key-value cache is for decoding and keeps no gradients. Decode under torch.no_grad() or "
                "torch.inference_mode(), or train on whole sequences, without a cache."
            )
        batch, heads, new, dimension = key.shape
        room = self._room
        if room is not None and (room.shape[1], *room.shape[3:]) != (batch, heads, dimension):
            raise ValueError(
                f"the cache holds keys of {room.shape[1]} sequences × {room.shape[3]} heads × {room.shape[4]}, but the "
                f"new ones are of {batch} × {heads} × {dimension}. Use one cache per layer and per batch; after the "
                "batch was rearranged, call reorder."
            )
        end = self.length + new
        if room is None or end > self.capacity:
            self.capacity = max(end, self.capacity if room is None else 2 * self.capacity)
            larger = key.new_empty(2, batch, self.capacity, heads, dimension)
            if room is not None:
                larger[:, :, : self.length] = room[:, :, : self.length]
            self._room = room = larger
        room[0, :, self.length : end] = key.transpose(1, 2)
        room[1, :, self.length : end] = value.transpose(1, 2)
        self.length = end
        return self.entries()

    def entries(self) -> tuple[Tensor, Tensor]:
        """The keys and the values of all positions so far, [batch, heads, positions, head dimension] each, as views."""
        if self._room is None:
            raise RuntimeError("the cache is empty: nothing was appended to it yet.")
        key, value = self._room[:, :, : self.length].transpose(2, 3).unbind(0)
        return key, value

    def reorder(self, indices: Tensor) -> None:
        """Let sequence i continue what was sequence indices[i], as beam search wants it; their number may change."""
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"indices must be a one-dimensional int32 or int64 tensor, got {indices.dtype} {list(indices.shape)}."
            )
        if self._room is not None:
            self._room = self._room.index_select(1, indices)
