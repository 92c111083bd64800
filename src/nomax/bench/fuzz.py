"""Random calls of the operation, each determined by a seed and a number, and their results against `exact`."""

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nomax
from nomax.bench import exact
from nomax.ops.problem import Problem
from nomax.ops.reference import kept
from nomax.phi import MINUS_LOG_L, Phi

NONNEGATIVE = ("relu", "relu2", "softplus", "relu6", "sigmoid")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MASKS = ("none", "causal", "lower right", "boolean", "bias", "packed", "packed causal")
LAYOUTS = ("contiguous", "joint", "transposed", "expanded", "shifted")
VALUES = ("normal", "small", "large", "eighths", "constant", "zeros", "tiny", "huge")
POISONS = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Case:
    """A call: its tensors as [B, H, L, D] (packed ones padded), its arguments, and the kind of case it is."""

    number: int
    kinds: dict[str, str]  # what to count it as
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    grad_rows: tuple[Tensor, Tensor]  # [B, H, Lq] each, float32
    mask: Tensor | None
    diagonal: int | None
    lengths: tuple[list[int], list[int]] | None  # of packed queries and keys
    phi: Phi
    scale: float | None
    dropout: float
    seed: int  # of dropout
    rows: bool
    gradients: bool
    poison: dict[str, Tensor]  # by tensor: where it is not finite

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {list(getattr(self, name).shape)}" for name in ("query", "key", "value"))
        mask = "" if self.mask is None else f", mask {list(self.mask.shape)} {str(self.mask.dtype)[6:]}"
        lengths = "" if self.lengths is None else f", lengths {self.lengths[0]} and {self.lengths[1]}"
        kinds = ", ".join(f"{name} {kind}" for name, kind in self.kinds.items() if name not in ("activation", "dtype"))
        return (
            f"case {self.number}: {self.phi}, {self.kinds['dtype']}, {sizes}{mask}{lengths}, scale {self.scale}, "
            f"dropout {self.dropout}, {kinds}"
        )


def draw(seed: int, number: int) -> Case:
    """Draw the case with this number for this seed."""
    chance = random.Random(f"{seed} {number}")
    torch.default_generator.manual_seed(chance.getrandbits(60))
    dtype_name = chance.choice(tuple(DTYPES))
    dtype = DTYPES[dtype_name]
    activation = chance.choice(tuple(exact.ACTIVATIONS))
    masking = chance.choices(MASKS, (4, 3, 1, 3, 3, 1, 1))[0]
    layout, values = chance.choice(LAYOUTS), chance.choices(VALUES, (8, 1, 1, 3, 1, 1, 1, 1))[0]
    gradients = chance.random() < 0.6
    rows = activation in NONNEGATIVE and chance.random() < 0.4

    batch, key_heads, group = chance.choice((1, 1, 2, 3)), chance.choice((1, 1, 2)), chance.choice((1, 1, 1, 2, 3))
    queries, keys = _length(chance), _length(chance)
    if chance.random() < 0.5:
        keys = queries
    if queries * keys > 40_000:
        batch = key_heads = group = 1
    heads = key_heads * group
    dim, value_dim = (chance.choice((1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24, 32, 33, 64, 80, 130)) for _ in range(2))
    if chance.random() < 0.4:
        value_dim = dim
    spread = {"small": 0.1, "large": 4.0, "tiny": 1e-12 if dtype != torch.float16 else 1e-4, "huge": 1e3}.get(values, 1)
    query, key, value, grad = (
        _numbers(_tensor(batch, of, length, width, layout), values, spread).to(dtype)
        for of, length, width in (
            (heads, queries, dim),
            (key_heads, keys, dim),
            (key_heads, keys, value_dim),
            (heads, queries, value_dim),
        )
    )

    gain = chance.choice((1.0, 1.0, 1.0, 0.5, 3.0, 0.0, 1e-3)) * (1 if rows or chance.random() < 0.8 else -1)
    shift = chance.choice((0.0, 0.0, 0.0, 0.75, -0.5, MINUS_LOG_L))
    length: Any = chance.choice(("visible", "visible", "keys", 17))
    threshold = chance.choice((0.0, 0.0, 0.0, 1.0, 0.5, -0.25))
    phi = Phi(activation, chance.choice((0.0, 1.0, 1.0, 0.5, -0.25)), gain, shift, length, threshold)
    scale = None if chance.random() < 0.8 else chance.choice((1.0, 0.3, -0.7, 0.0))
    dropout = chance.choices((0.0, 0.1, 0.5, 0.9, 1.0), (7, 1, 1, 0.5, 0.2))[0]

    mask, diagonal, lengths = None, None, None
    if masking in ("boolean", "bias"):
        mask = _mask(chance, masking, (batch, heads, queries, keys), dtype)
    elif masking in ("causal", "packed causal"):
        diagonal = 0
    elif masking == "lower right":
        diagonal = keys - queries
    if masking.startswith("packed"):
        query_lengths, key_lengths = ([chance.randint(0, most) for _ in range(batch)] for most in (queries, keys))
        lengths = query_lengths, key_lengths

    poison: dict[str, Tensor] = {}
    poison_kind = "none" if chance.random() < 0.9 else chance.choice(tuple(POISONS))
    tensors = {"query": query, "key": key, "value": value, "grad": grad}
    if poison_kind != "none":
        name = chance.choice(tuple(tensors))
        strange = torch.rand(tensors[name].shape) < chance.choice((0.01, 0.1))
        tensors[name] = torch.where(strange, torch.tensor(POISONS[poison_kind], dtype=dtype), tensors[name])
        poison[name] = strange
    return Case(
        number,
        {
            "activation": activation,
            "dtype": dtype_name,
            "mask": masking,
            "layout": layout,
            "values": values,
            "not finite": poison_kind,
            "dropout": "no" if dropout == 0 else "yes",
            "rows": "yes" if rows else "no",
            "gradients": "yes" if gradients else "no",
            "heads": "groups" if group > 1 else "as many",
        },
        **tensors,
        grad_rows=(torch.randn(batch, heads, queries), torch.randn(batch, heads, queries)),
        mask=mask,
        diagonal=diagonal,
        lengths=lengths,
        phi=phi,
        scale=scale,
        dropout=dropout,
        seed=chance.getrandbits(31),
        rows=rows,
        gradients=gradients,
        poison=poison,
    )


def call(case: Case) -> dict[str, Tensor]:
    """Return the kernels' results through the public API, packed ones padded again."""
    leaves = {name: getattr(case, name).detach() for name in ("query", "key", "value")}
    grad, grad_rows, mask = case.grad, list(case.grad_rows), case.mask
    if case.lengths is not None:
        query_lengths, key_lengths = case.lengths
        leaves = {name: _packed(x, query_lengths if name == "query" else key_lengths) for name, x in leaves.items()}
        grad = _packed(grad, query_lengths)
        grad_rows = [_packed(x.unsqueeze(-1), query_lengths).squeeze(-1) for x in grad_rows]
    if mask is not None and mask.is_floating_point():
        leaves["bias"] = mask = mask.detach()
    if case.gradients:
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    query, key, value = (leaves[name] for name in ("query", "key", "value"))
    arguments: dict[str, Any] = {
        "dropout_p": case.dropout,
        "scale": case.scale,
        "enable_gqa": True,
        "phi": case.phi,
        "backend": "cpu",
        "return_rows": case.rows,
    }
    torch.default_generator.manual_seed(case.seed)
    if case.lengths is not None:
        bounds, key_bounds = (torch.tensor([0, *lengths]).cumsum(0) for lengths in case.lengths)
        arguments["is_causal"] = case.diagonal == 0
        result = nomax.varlen_attention(query, key, value, bounds, key_bounds, **arguments)
    elif case.diagonal:
        mask = _lower_right(query.shape[2], key.shape[2])
        result = nomax.attention(query, key, value, mask, **arguments)
    else:
        result = nomax.attention(query, key, value, mask, is_causal=case.diagonal == 0, **arguments)
    outputs = (result[0], *result[1]) if case.rows else (result,)
    results = dict(zip(("out", "sum", "entropy"), (x.detach() for x in outputs), strict=False))
    if case.gradients:
        arriving = (grad, *grad_rows) if case.rows else (grad,)
        results |= dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), arriving), strict=True))
    if case.lengths is not None:
        for name, x in results.items():
            of_keys = name in ("key", "value")
            longest = (case.key if of_keys else case.query).shape[2]
            padded = _padded(x if x.dim() == 3 else x.unsqueeze(-1), case.lengths[of_keys], longest)
            results[name] = padded if x.dim() == 3 else padded.squeeze(-1)
    return results


@dataclass(frozen=True, slots=True)
class Expectation:
    """The correct results, the allowed errors, and the results that a non-finite number may affect."""

    results: dict[str, exact.Bounded]
    reached: dict[str, Tensor]


def expected(case: Case) -> Expectation:
    """Compute the expected results of a case, in float64."""
    batch, heads, queries, keys = *case.query.shape[:3], case.key.shape[2]
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    present = torch.ones(batch, 1, queries, 1, dtype=torch.bool)
    bias = torch.zeros(1, dtype=torch.float64)
    length = torch.full((1, 1, 1, 1), float(keys), dtype=torch.float64)
    if case.lengths is not None:
        query_lengths, key_lengths = (torch.tensor(each).view(batch, 1, 1, 1) for each in case.lengths)
        present = torch.arange(queries).view(1, 1, queries, 1) < query_lengths
        seen = seen & present & (torch.arange(keys) < key_lengths)
        length = key_lengths.double()
    if case.diagonal is not None:
        seen = seen & (torch.arange(keys) <= torch.arange(queries)[:, None] + case.diagonal)
    if case.mask is not None and case.mask.dtype == torch.bool:
        seen = seen & case.mask
    elif case.mask is not None:
        hidden = case.mask <= torch.finfo(case.mask.dtype).min
        seen, bias = seen & ~hidden, case.mask.double().masked_fill(hidden, 0)
    if case.phi.length == "visible":
        length = seen.sum(-1, keepdim=True).double()
    elif case.phi.length != "keys":
        length = torch.full((1, 1, 1, 1), float(case.phi.length), dtype=torch.float64)
    length = length.clamp(min=1)
    shift = -length.log() if case.phi.shift == MINUS_LOG_L else torch.full_like(length, float(case.phi.shift))
    shift = shift - case.phi.threshold * (2 * length.log()).sqrt()
    coins = torch.ones(1, dtype=torch.float64)
    if case.dropout > 0:
        torch.default_generator.manual_seed(case.seed)
        call = Problem(query=case.query, key=case.key, value=case.value, dropout=case.dropout)
        stays = kept(call, torch.randint(2**63 - 1, ()))
        coins = stays.double() * (1 / (1 - case.dropout) if case.dropout < 1 else 0)

    plain = case.mask is None and case.diagonal is None and case.lengths is None
    unshifted = case.phi.shift == 0 and case.phi.threshold == 0
    linear = case.phi.activation == "identity" and plain and unshifted and not (case.dropout or case.rows)
    query, key, value, grad = (
        _clean(case, name).double() * (present if name in ("query", "grad") else 1)
        for name in ("query", "key", "value", "grad")
    )
    grad_rows = [x.double().unsqueeze(-1) * present for x in case.grad_rows] if case.rows else [None, None]
    problem = exact.Problem(
        query,
        key.repeat_interleave(case.group, 1),
        value.repeat_interleave(case.group, 1),
        seen,
        bias.expand(batch, heads, queries, keys),
        case.phi.activation,
        query.shape[3] ** -0.5 if case.scale is None else case.scale,
        case.phi.gain * length**-case.phi.alpha,
        shift,
        coins.expand(batch, heads, queries, keys),
        case.group,
        case.query.dtype == torch.bfloat16 and not linear,
        grad if case.gradients else None,
        *grad_rows,
    )
    wanted = exact.results(problem, case.rows)
    if case.gradients:
        for name in ("key", "value"):
            wanted[name] = _each(wanted[name], lambda x: _sum_groups(x, case.group))
        scores, mask = wanted.pop("scores"), case.mask
        if mask is not None and mask.is_floating_point():
            wanted["bias"] = _each(scores, lambda x: _sum_to(x, mask.shape))
    for name in ("sum", "entropy"):
        if name in wanted:
            wanted[name] = _each(wanted[name], lambda x: x.squeeze(-1))
    if not case.poison:
        return Expectation(wanted, {})
    sizes = query.abs() @ problem.key.abs().mT * abs(problem.scale) + bias.abs() + shift.abs()
    plain_scores = query @ problem.key.mT * problem.scale + bias + shift
    positive = (plain_scores > 0.01 * sizes) & (plain_scores > 1e-6)  # also as rounded: no h of these is zero
    return Expectation(wanted, _reached(case, seen, coins, positive))


def compare(case: Case, results: dict[str, Tensor], expectation: Expectation, pairs: bool) -> dict[str, Tensor]:
    """Return the actual error divided by the allowed one for each result, number by number.

    pairs: whether the kernels multiplied pairs of bfloat16.
    """
    ratios = {}
    for name, (result, bound, of_pairs) in expectation.results.items():
        ratio = exact.worst(results[name], result, bound + of_pairs if pairs else bound)
        if name in expectation.reached:
            reached = expectation.reached[name].expand(ratio.shape)
            ratio = ratio.masked_fill(reached, 0)
            # A NaN shows forwards where no weight of zero may hide it; backwards a slope of zero may stop it.
            if name == "out" and case.kinds["not finite"] == "NaN":
                ratio = ratio.masked_fill(expectation.reached["shown"] & ~results[name].isnan(), exact.HOPELESS)
        ratios[name] = ratio
    return ratios


def _length(chance: random.Random) -> int:
    """Draw a length: mostly short, sometimes across the kernels' blocks of 60, 128, 192 and 512, sometimes zero."""
    most = chance.choices((0, 9, 40, 140, 700), (0.2, 12, 3, 0.6, 0.04))[0]
    return chance.randint(min(1, most), most)


def _tensor(batch: int, heads: int, length: int, dim: int, layout: str) -> Tensor:
    """Draw normal numbers, as [batch, heads, length, dim], in one of the layouts that models use."""
    match layout:
        case "joint":  # one third of a joint projection
            return torch.randn(batch, length, 3, heads, dim).permute(2, 0, 3, 1, 4)[1]
        case "transposed":
            return torch.randn(batch, heads, dim, length).mT
        case "expanded":
            return torch.randn(1, heads, length, dim).expand(batch, -1, -1, -1)
        case "shifted":  # rows that begin at odd places
            return torch.randn(batch, heads, length, dim + 1)[..., 1:]
    return torch.randn(batch, heads, length, dim)


def _numbers(x: Tensor, values: str, spread: float) -> Tensor:
    match values:
        case "eighths":  # sums of them are exact, and hit the kinks
            return (x * 8).round() / 8
        case "constant":
            return torch.full((1, 1, 1, 1), float(torch.randn(()))).expand(x.shape)
        case "zeros":
            return x * (torch.rand(x.shape) < 0.5)
    return x * spread if spread != 1 else x


def _mask(chance: random.Random, kind: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    own = tuple(size if chance.random() < 0.6 else 1 for size in shape)
    share = chance.choice((0.0, 0.3, 0.7, 1.0))
    hidden = torch.rand(own) < share
    if kind == "boolean":
        return ~hidden
    bias = torch.randn(own).to(chance.choice((dtype, torch.float32)))
    return bias.masked_fill(hidden, chance.choice((-math.inf, torch.finfo(bias.dtype).min)))


def _lower_right(queries: int, keys: int) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NaN where a query sees nothing, which is softmax's trouble and not ours
        return causal_lower_right(queries, keys)


def _packed(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([part[:, :length].transpose(0, 1) for part, length in zip(x, lengths, strict=True)])


def _padded(x: Tensor, lengths: list[int], longest: int) -> Tensor:
    out = x.new_zeros(len(lengths), x.shape[1], longest, x.shape[2])
    for part, packed, length in zip(out, x.split(lengths), lengths, strict=True):
        part[:, :length] = packed.transpose(0, 1)
    return out


def _clean(case: Case, name: str) -> Tensor:
    x: Tensor = getattr(case, name)
    return x.masked_fill(case.poison[name], 0) if name in case.poison else x


def _each(of: exact.Bounded, change: Callable[[Tensor], Tensor]) -> exact.Bounded:
    result, bound, pairs = of
    return change(result), change(bound), change(pairs) if isinstance(pairs, Tensor) else pairs


def _sum_groups(x: Tensor, group: int) -> Tensor:
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2)


def _sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    return x.sum([d for d in range(4) if shape[d] == 1], keepdim=True) if 1 in shape else x


def _reached(case: Case, seen: Tensor, coins: Tensor, positive: Tensor) -> dict[str, Tensor]:
    """Find the results that depend on a non-finite number; "shown" are outputs that cannot but show it.

    positive: where a score is, beyond doubt.
    """

    def strange(name: str) -> Tensor:
        x = case.poison.get(name)
        if x is None:
            return torch.zeros(getattr(case, name).shape, dtype=torch.bool)
        if case.lengths is not None:  # of what is not in the packed tensors there is nothing
            lengths = torch.tensor(case.lengths[name in ("key", "value")]).view(-1, 1, 1, 1)
            x = x & (torch.arange(x.shape[2]).view(1, 1, -1, 1) < lengths)
        return x

    query, grad = strange("query"), strange("grad")
    key, value = (strange(name).repeat_interleave(case.group, 1) for name in ("key", "value"))
    stays = (coins != 0).expand(seen.shape)
    scores = seen & (query.any(-1, keepdim=True) | key.any(-1).unsqueeze(-2))
    of_scores = scores | (seen & stays & (grad.any(-1, keepdim=True) | value.any(-1).unsqueeze(-2)))

    def meets(where: Tensor, what: Tensor) -> Tensor:
        return (where.double() @ what.double()) > 0

    reached = {
        "shown": (scores & stays).any(-1, keepdim=True) | meets(seen & stays & positive, value),
        "out": (scores & stays).any(-1, keepdim=True) | meets(seen, value),
        "sum": scores.any(-1),
        "entropy": scores.any(-1),
        "query": of_scores.any(-1, keepdim=True),
        "key": of_scores.any(-2).unsqueeze(-1),
        "value": (scores & stays).any(-2).unsqueeze(-1) | meets(seen.mT, grad),
    }
    if case.mask is not None:
        reached["bias"] = _sum_to(of_scores.double(), case.mask.shape) > 0
    for name in ("key", "value"):
        reached[name] = _sum_groups(reached[name].double(), case.group) > 0
    return reached
