"""`parallelize`: split the sequence of a model over ranks, between its first layer and its last."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nomax.models import ReLUFormer, ViT
from nomax.nn.layers import angles
from nomax.parallel.api import ScheduleName, attention, gather
from nomax.parallel.layout import Layout
from nomax.parallel.ranks import Ranks
from nomax.parallel.split_problem import SplitProblem
from nomax.parallel.stacks import check_cache, converted_layers, local_length, own_arguments
from nomax.phi import Phi

Placement = Literal["contiguous", "zigzag"]
LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag}


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    schedule: ScheduleName = "auto",
    gather_output: bool = True,
    layers: Sequence[nn.Module] | None = None,
    placement: Placement = "contiguous",
) -> nn.Module:
    """Split the sequences of a model over the ranks of one dimension of a DeviceMesh, in place, and return the model.

    Every rank calls the model with the same, whole inputs. Before the first layer each rank takes its own positions of
    the embedded sequence, so layers compute and remember 1/ranks of it; after the last layer they are gathered. What
    comes before and after (embedding, positions, the class token, pooling, the head) sees whole sequences, as ever.

    The gradients of the parameters are right once they are averaged over the ranks, as DistributedDataParallel and
    fully_shard do: over the whole mesh, where another dimension of it splits the batch. Seed ranks differently, or
    nn.Dropout drops the same places on each; coins of attention's own dropout are the first rank's.

    gather_output: False leaves the last layer's output split, for models whose output has a place for each token. Then
        a rank's logits are those of its own tokens: `split` cuts the labels alike, and `total` adds up the losses.
    layers: the layers between which to split, for models other than ViT, ReLUFormer and those that nomax.convert
        changed: they take and return [batch, positions, dim], first or as `hidden_states`, one after the other, and
        attend, each to itself, with nomax.nn.Attention or any module that has an attribute `split` and uses it as that
        one does. Masks, position_ids and position_embeddings that they get are those of whole sequences.
    placement: "zigzag" gives each rank as much of causal attention. ReLUFormer's decoder always has it.
    """
    ranks = Ranks(mesh)
    stacks: list[tuple[Sequence[nn.Module], Placement, bool]]
    if layers is not None:
        stacks = [(layers, placement, gather_output)]
    elif isinstance(model, ViT):
        if not gather_output:
            raise ValueError("gather_output=False leaves a ViT nothing to pool: its output has no place for tokens.")
        stacks = [(list(model.blocks), placement, True)]
    elif isinstance(model, ReLUFormer):
        # The encoded source stays split: each rank's part is the context of its own keys and values.
        encoder = [(list(model.encoder), "contiguous", False)] if len(model.encoder) else []
        stacks = [*encoder, (list(model.decoder), "zigzag", gather_output)]  # type: ignore[list-item]
    elif converted := converted_layers(model):
        stacks = [(converted, placement, gather_output)]
    else:
        raise ValueError(
            f"parallelize knows ViT, ReLUFormer and models that nomax.convert has changed, but model is a "
            f"{type(model).__name__}: give its layers, such as layers=model.blocks."
        )
    source: SplitSequence | None = None
    for members, chosen, gathers in stacks:
        sequence = SplitSequence(ranks, chosen, schedule)
        attentions: list[Any] = [module for layer in members for module in layer.modules() if hasattr(module, "split")]
        if not attentions:
            raise ValueError(
                f"the layers of {type(model).__name__} have no attention that can be split, such as nomax.nn.Attention."
            )
        for module in attentions:
            if module.split is not None:
                raise ValueError("the sequences of this model are split already: parallelize it once.")
            keys = sequence if getattr(module, "context_dim", None) is None else source
            if keys is None:
                raise ValueError("cross-attention needs a context whose split is known, as in ReLUFormer.")
            module.split = SplitSelfOrCross(sequence, keys)
        members[0].register_forward_pre_hook(sequence.enter, with_kwargs=True)
        if not isinstance(model, ViT | ReLUFormer):  # whose layers are told of no positions
            for layer in members:
                layer.register_forward_pre_hook(sequence.tell, with_kwargs=True)
        if gathers:
            members[-1].register_forward_hook(sequence.leave)
        source = sequence
    return model


class SplitSequence:
    """The sequence of a stack of layers: how it is split follows from its length, when it enters the first layer."""

    def __init__(self, ranks: Ranks, placement: Placement, schedule: ScheduleName) -> None:
        self.ranks, self.placement, self.schedule = ranks, placement, schedule
        self.layout = Layout.contiguous(0, ranks.size)

    def enter(
        self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take this rank's positions of the whole sequence [batch, positions, dim]."""
        whole: Tensor = inputs[0] if inputs else named["hidden_states"]
        check_cache(layer, named)
        self.layout = LAYOUTS[self.placement](local_length(whole), self.ranks.size)
        own = self.layout.local(whole, self.ranks.rank, 1)
        return ((own, *inputs[1:]), named) if inputs else ((), named | {"hidden_states": own})

    def tell(
        self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Tell a layer only of this rank's positions."""
        rank, layout = self.ranks.rank, self.layout
        return own_arguments(layer, inputs, named, layout.length, lambda x, dim: layout.local(x, rank, dim))

    def leave(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Gather the positions of all ranks."""
        if isinstance(output, tuple):
            return gather(output[0], self.ranks.mesh, 1, self.layout), *output[1:]
        return gather(output, self.ranks.mesh, 1, self.layout)


class SplitSelfOrCross:
    """Attention of a layer, from one sequence to itself or another: what nn.attention.SplitAttention asks for."""

    def __init__(self, queries: SplitSequence, keys: SplitSequence) -> None:
        self.queries, self.keys = queries, keys

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *others: Any, **settings: Any
    ) -> Any:
        layout, rank = self.queries.layout, self.queries.ranks.rank
        if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] == layout.length > 1:
            attn_mask = layout.local(attn_mask, rank, -2)
        return attention(
            query,
            key,
            value,
            attn_mask,
            *others,
            mesh=self.queries.ranks.mesh,
            schedule=self.queries.schedule,
            layout=layout,
            key_layout=self.keys.layout,
            **settings,
        )

    def lengths(self, phi: Phi, query: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        problem = SplitProblem(
            phi=phi, queries=self.queries.layout, keys=self.keys.layout, scale=1.0, causal=is_causal, mask=mask
        )
        return torch.as_tensor(problem.lengths(self.queries.ranks.rank, query), device=query.device).clamp(min=1)

    def rotation(self, dimension: int, like: Tensor) -> tuple[Tensor, ...]:
        layout = self.queries.layout
        both = angles(0, layout.length, dimension, like)
        return tuple(layout.local(each, self.queries.ranks.rank, 0) for each in both)

    def whole(self, numbers: Tensor) -> Tensor:
        return gather(numbers, self.queries.ranks.mesh, numbers.dim() - 1, self.queries.layout)
