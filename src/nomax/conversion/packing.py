"""Batches without padding: all sequences in one row, with their bounds, and the proof that a model keeps them apart.

The arguments are those of transformers' DataCollatorWithFlattening. Converted attention keeps sequences apart by their
bounds; but a model may not hand the bounds to its attention, or mix positions elsewhere, as convolutions do.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

HOOK = "_packing_guard"  # the attribute of a converted model that keeps the handle of its hook
PROVED = "_packing_proved"
PROBED = 4  # positions of each of two sequences
CHECKED = "_fits_bounds"  # the attribute of a mask that was compared with the bounds


def pack(input_ids: Tensor, attention_mask: Tensor, first_position: int = 0) -> dict[str, Tensor | int]:
    """Return the arguments that make a model of transformers compute real tokens only: model(**pack(ids, mask)).

    They are what its DataCollatorWithFlattening makes: one row of all tokens, their positions, and the bounds of the
    sequences, which converted attention keeps apart. A model that does not keep sequences apart everywhere, as with
    sliding windows, position biases or convolutions, raises an error that says so.

    input_ids, attention_mask: [batch, length], as a tokenizer gives them, padded on either side.
    first_position: the number of the first position; 2 in RoBERTa, where positions begin after that of padding.
    """
    real = attention_mask.bool()
    positions = (real.long().cumsum(1) - 1)[real] + first_position
    return _arguments(input_ids[real], positions, real.sum(1))


def unpack(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the outputs of a packed batch [1, tokens, dim] as [batch, length, dim], with zeros for padding."""
    padded = hidden.new_zeros(*attention_mask.shape, hidden.shape[-1])
    padded[attention_mask.bool()] = hidden.squeeze(0)
    return padded


def _arguments(tokens: Tensor, positions: Tensor, lengths: Tensor) -> dict[str, Tensor | int]:
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def prove(model: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Raise unless a model, which is called with packed sequences for the first time, keeps them apart.

    Two short sequences, packed, must give what the second one gives alone. This is a hook of converted models.
    """
    if torch.compiler.is_compiling() or vars(model).get(PROVED):
        return
    if any(given.get(name) is None for name in ("input_ids", "position_ids", "cu_seq_lens_q")):
        return
    lengths = given["cu_seq_lens_q"].diff()
    first = int(given["cu_seq_lens_q"][lengths.argmax()])
    part = slice(first, first + min(PROBED, int(lengths.max())))
    tokens, positions = given["input_ids"][0, part], given["position_ids"][0, part]
    if len(tokens) < 2:  # too short to tell
        return
    vars(model)[PROVED] = True  # now, so that the calls below pass
    other = tokens.flip(0)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            halves = torch.tensor([len(tokens)] * 2, device=tokens.device)
            both = model(**_arguments(torch.cat([other, tokens]), positions.repeat(2), halves))[0]
            alone = model(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0))[0]
    except BaseException:
        del vars(model)[PROVED]
        raise
    finally:
        for module, training in modes:
            module.training = training
    if not isinstance(both, Tensor) or not isinstance(alone, Tensor):
        return
    most = 1e-3 if alone.dtype in (torch.float32, torch.float64) else 5e-2
    off = float((both[:, len(tokens) :].float() - alone.float()).abs().max())
    if not off <= most * max(float(alone.float().abs().max()), 1.0):
        del vars(model)[PROVED]
        raise ValueError(
            f"this {type(model).__name__} does not keep packed sequences apart: a sequence packed behind another gives "
            f"something else than alone, by up to {off:.2g}. Its attention does not get their bounds (cu_seq_lens_q), "
            "or other layers mix positions. Pad the sequences instead."
        )


def check_mask(module: nn.Module, mask: Tensor | None, bounds: Tensor, causal: bool) -> None:
    """Raise if the mask of packed sequences, whose place the bounds take, says more than they do."""
    if mask is None or torch.compiler.is_compiling() or getattr(mask, CHECKED, False):
        return
    queries, keys = mask.shape[-2:]
    of = torch.bucketize(torch.arange(keys, device=mask.device), bounds.to(mask.device), right=True)
    expected = of[:, None] == of[None, :] if queries > 1 else torch.ones(1, keys, dtype=torch.bool, device=mask.device)
    if causal and queries > 1:
        expected = expected.tril()
    visible = mask if mask.dtype == torch.bool else mask == 0
    if queries not in (1, keys) or not torch.equal(visible, expected.expand_as(visible)):
        raise ValueError(
            f"{type(module).__name__} got packed sequences (cu_seq_lens_q) and a mask that says more than their "
            "bounds, as of chunks or of a window, which would be lost. Pad the sequences instead."
        )
    setattr(mask, CHECKED, True)  # all layers get the same mask
