"""Batches without padding for converted models of transformers: all sequences in one row, with their bounds."""

import torch
from torch import Tensor


def pack(input_ids: Tensor, attention_mask: Tensor, first_position: int = 0) -> dict[str, Tensor | int]:
    """Return the arguments that make a model of transformers compute real tokens only: model(**pack(ids, mask)).

    They are what its DataCollatorWithFlattening makes: one row of all tokens, their positions, and the bounds of the
    sequences, which converted attention keeps apart. Not for models with sliding windows or position biases.

    input_ids, attention_mask: [batch, length], as a tokenizer gives them, padded on either side.
    first_position: the number of the first position; 2 in RoBERTa, where positions begin after that of padding.
    """
    real = attention_mask.bool()
    lengths = real.sum(1)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    positions = (real.long().cumsum(1) - 1)[real] + first_position
    longest = int(lengths.max())
    return {
        "input_ids": input_ids[real].unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def unpack(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the outputs of a packed batch [1, tokens, dim] as [batch, length, dim], with zeros for padding."""
    padded = hidden.new_zeros(*attention_mask.shape, hidden.shape[-1])
    padded[attention_mask.bool()] = hidden.squeeze(0)
    return padded
