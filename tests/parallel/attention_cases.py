"""Cases of sequence-parallel attention, each compared on every rank with `nomax.attention` of the whole."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from precision import assert_precise
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import nomax
from nomax.parallel import Layout, attention, dtensor, gather, measure, ranks, split, total
from nomax.parallel.api import sent
from nomax.parallel.peers import WAYS
from nomax.parallel.split_problem import SplitProblem

B, HEADS, LENGTH, D, DV = 2, 4, 22, 8, 6
SCHEDULES = ("ring", "reduce")
EQUAL = 1e-6  # of the largest number: some ten roundings of float32


def tensors(queries=LENGTH, keys=LENGTH, key_heads=HEADS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = [(B, HEADS, queries, D), (B, key_heads, keys, D), (B, key_heads, keys, DV)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def uneven(length: int, ranks: int) -> Layout:
    """Give the first rank nothing (if there is another), and the last the most."""
    sizes = [0] + [1 + rank for rank in range(ranks - 2)]
    return Layout.sized([*sizes, length - sum(sizes)] if ranks > 1 else [length])


def local_mask(mask, layout, rank):
    return mask if mask is None or mask.shape[-2] == 1 else layout.local(mask, rank, -2)


def compare(mesh, schedule, *, queries=LENGTH, keys=LENGTH, make=Layout.contiguous, told=True, **settings):
    """Compare outputs, rows and gradients with those of one process."""
    mask, rows = settings.pop("attn_mask", None), settings.pop("return_rows", False)
    key_heads = settings.pop("key_heads", HEADS)
    settings.setdefault("phi", "relu/L^0.5")
    rank, ranks = mesh.get_local_rank(), mesh.size()
    layout, key_layout = make(queries, ranks), make(keys, ranks)
    whole = tensors(queries, keys, key_heads)
    whole_mask = mask
    if mask is not None and mask.dtype.is_floating_point:
        whole_mask = mask.clone().requires_grad_()

    torch.manual_seed(7)
    expected = nomax.attention(*whole, whole_mask, return_rows=rows, **settings)
    expected = (expected[0], *expected[1]) if rows else (expected,)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(expected)]
    sum((x * w).sum() for x, w in zip(expected, weights, strict=True)).backward()

    layouts = (layout, key_layout, key_layout)
    parts = [each.local(x.detach(), rank, 2).clone().requires_grad_() for x, each in zip(whole, layouts, strict=True)]
    part_mask = local_mask(mask, layout, rank)
    if mask is not None and mask.dtype.is_floating_point:
        part_mask = part_mask.clone().requires_grad_()
    torch.manual_seed(7 if rank == 0 else 1000 + rank)  # the first rank's coins count
    given = {"layout": layout, "key_layout": key_layout} if told else {}
    actual = attention(*parts, part_mask, mesh=mesh, schedule=schedule, return_rows=rows, **given, **settings)
    actual = (actual[0], *actual[1]) if rows else (actual,)
    part_weights = [layout.local(w, rank, 2) for w in weights]
    sum((x * w).sum() for x, w in zip(actual, part_weights, strict=True)).backward()

    for x, y in zip(actual, expected, strict=True):
        close(x, layout.local(y, rank, 2), y)
    for x, y, each in zip(parts, whole, layouts, strict=True):
        close(x.grad, each.local(y.grad, rank, 2), y.grad)
    if whole_mask is not None and whole_mask.requires_grad:
        if mask.shape[-2] == 1:  # every rank's share of it
            close(total(part_mask.grad, mesh), whole_mask.grad, whole_mask.grad)
        else:
            close(part_mask.grad, layout.local(whole_mask.grad, rank, -2), whole_mask.grad)


def close(actual: Tensor, expected: Tensor, whole: Tensor) -> None:
    scale = float(whole.detach().abs().max()) if whole.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=EQUAL * max(scale, 1.0))


def half_precision(mesh, schedule, length=LENGTH, dropout_p=0.0):
    """The error may be at most twice that of one process."""
    rank, layout = mesh.get_local_rank(), Layout.zigzag(length, mesh.size())
    whole = tensors(length, length, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in whole]
    settings = {"is_causal": True, "dropout_p": dropout_p}
    torch.manual_seed(7)
    alone = nomax.attention(*whole, **settings)
    torch.manual_seed(7)
    truth = nomax.attention(*exact, **settings)
    torch.manual_seed(7)
    weight = torch.randn(alone.shape, generator=torch.Generator().manual_seed(0))
    alone.backward(weight.bfloat16())
    truth.backward(weight.bfloat16().double())
    parts = [layout.local(x.detach(), rank, 2).clone().requires_grad_() for x in whole]
    out = attention(*parts, **settings, mesh=mesh, layout=layout, schedule=schedule)
    out.backward(layout.local(weight.bfloat16(), rank, 2))
    together = partial(gather, mesh=mesh, dim=2, layout=layout)
    assert_precise(together(out), alone, truth)
    for part, one, best in zip(parts, whole, exact, strict=True):
        assert_precise(together(part.grad), one.grad, best.grad)


def doubles(mesh, schedule):
    """float64 stays float64."""
    rank, layout = mesh.get_local_rank(), Layout.contiguous(LENGTH, mesh.size())
    whole = tensors(dtype=torch.float64)
    expected = nomax.attention(*whole)
    expected.sum().backward()
    parts = [layout.local(x.detach(), rank, 2).clone().requires_grad_() for x in whole]
    out = attention(*parts, mesh=mesh, layout=layout, schedule=schedule)
    out.sum().backward()
    torch.testing.assert_close(out, layout.local(expected, rank, 2), rtol=0, atol=1e-14)
    torch.testing.assert_close(parts[1].grad, layout.local(whole[1].grad, rank, 2), rtol=0, atol=1e-13)


def leading_dimensions(mesh, schedule):
    """Without a batch, and with two."""
    layout, rank = Layout.contiguous(LENGTH, mesh.size()), mesh.get_local_rank()
    for shape in [(), (3,), (2, 1, 3)]:
        whole = torch.randn(3, *shape, LENGTH, D, generator=torch.Generator().manual_seed(1))
        mask = torch.rand(LENGTH, generator=torch.Generator().manual_seed(2)) > 0.3
        parts = [layout.local(x, rank, -2) for x in whole]
        out = attention(*parts, mask[None], mesh=mesh, schedule=schedule)
        expected = nomax.attention(*whole, mask[None])
        close(out, layout.local(expected, rank, -2), expected)


def fewest_bytes(mesh):
    """ "auto" gathers a few queries for many keys, and moves a few key heads for many queries."""
    from nomax.parallel import api

    chosen = []
    choose = api._choose
    api._choose = lambda *inputs: chosen.append(choose(*inputs)) or chosen[-1]
    try:
        compare(mesh, "auto", queries=4, keys=LENGTH)
        compare(mesh, "auto", key_heads=1, enable_gqa=True)
        compare(mesh, "auto", attn_mask=torch.rand(LENGTH, LENGTH) > 0.5 if mesh.size() == 1 else mask(1, LENGTH))
    finally:
        api._choose = choose
    assert chosen[1] == "ring"
    assert chosen[0] == ("reduce" if mesh.size() > 1 else "ring")


def whole_and_parts(mesh):
    """`split` and `gather` undo each other, and their gradients follow the mean over ranks."""
    ranks, layout = mesh.size(), Layout.zigzag(13, mesh.size())
    x = torch.arange(26.0).view(2, 13).requires_grad_()
    part = split(x, mesh, 1, layout)
    assert part.tolist() == x[:, layout.positions(mesh.get_local_rank())].tolist()
    again = gather(part, mesh, 1, layout)
    assert torch.equal(again, x)
    assert torch.equal(gather(split(x, mesh, 1), mesh, 1), x)  # sizes are told
    (again**2).sum().backward()
    close(total(x.grad, mesh) / ranks, 2 * x.detach(), x)  # as DDP averages
    own = torch.tensor(float(mesh.get_local_rank()), requires_grad=True)
    (total(own, mesh) ** 2).backward()
    assert float(own.grad) == ranks * 2 * sum(range(ranks))


def refused(mesh):
    """Wrong arguments are errors that say what to do, on every rank alike, before anything is sent."""
    whole, size = tensors(), mesh.size()
    layout = Layout.contiguous(LENGTH, size)
    parts = [split(x, mesh, 2) for x in whole]
    refusals = [
        ({"phi": "softmax"}, "context_parallel"),
        ({"schedule": "tree"}, "schedule='tree' is unknown"),
        ({"layout": Layout.contiguous(LENGTH, size + 1)}, f"layout is for {size + 1} ranks"),
        ({"layout": Layout.contiguous(LENGTH + size, size)}, "nomax.parallel.split"),
        ({"key_layout": layout}, "without layout"),
        ({"mesh": "cpu"}, "must be a torch.distributed DeviceMesh"),
        ({"attn_mask": torch.ones(3, LENGTH + 1, dtype=torch.bool), "layout": layout}, "does not broadcast"),
        ({"attn_mask": torch.ones(layout.sizes[mesh.get_local_rank()], LENGTH, dtype=torch.bool),
          "layout": layout, "schedule": "reduce"}, "Use schedule='ring'"),
        ({"attn_mask": torch.ones(1, LENGTH, dtype=torch.bool), "is_causal": True, "layout": layout}, "exclude"),
        ({"phi": "gelu/L", "return_rows": True}, "never negative"),
    ]  # fmt: skip
    for settings, words in refusals:
        with pytest.raises((ValueError, TypeError), match=words):
            attention(*parts, **{"mesh": mesh, **settings})


def peers(mesh):
    """The ways that are compared with ours compute what they should."""
    layout, rank = Layout.contiguous(16, mesh.size()), mesh.get_local_rank()
    for (phi, _), way in WAYS.items():
        whole = [x.detach()[..., :DV].contiguous().requires_grad_() for x in tensors(16, 16)]
        expected = nomax.attention(*whole, phi=phi)
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
        expected.backward(weight)
        parts = [layout.local(x.detach(), rank, 2).contiguous().requires_grad_() for x in whole]
        out = way(*parts, mesh)
        out.backward(layout.local(weight, rank, 2))
        close(out, layout.local(expected, rank, 2), expected)
        for part, one in zip(parts, whole, strict=True):
            close(part.grad, layout.local(one.grad, rank, 2), one.grad)


def exchanges(mesh):
    """What each way exchanges is counted, and ours is as few as the documentation says."""
    n = mesh.size()
    if n == 1:
        return
    by_way = {(cost.phi, cost.schedule): cost for cost in measure.counted(mesh, 16, "bfloat16")}
    ring, reduce = by_way["relu/L", "keys travel"], by_way["relu/L", "keys stay"]
    none = dict.fromkeys(measure.KINDS, 0)
    assert ring.forward == none | {"message": n - 1}
    assert ring.backward == none | {"message": 2 * (n - 1)}
    assert reduce.forward == reduce.backward == none | {"gather": 1, "reduce-scatter": 1}
    # A fair softmax exchanges as often, and a few more bytes: its rows' sums.
    fair = by_way["softmax", "keys travel"], by_way["softmax", "keys stay"]
    assert [each.exchanges for each in fair] == [each.exchanges for each in (ring, reduce)]
    assert fair[0].bytes_forward == ring.bytes_forward
    assert fair[1].forward == none | {"gather": 1, "all-to-all": 1}
    numbers_of_rows = 16 // n * measure.BATCH * measure.HEADS
    assert fair[1].bytes_forward == reduce.bytes_forward + (n - 1) * numbers_of_rows * 4
    assert fair[1].bytes_backward == reduce.bytes_backward + (n - 1) * numbers_of_rows * 8
    assert by_way["softmax", "keys stay, sums first"].forward["gather"] == 2
    numbers = 16 // n * measure.BATCH * measure.HEADS * measure.DIM  # of this rank's queries, keys or values
    assert ring.bytes_forward == (n - 1) * 2 * numbers * 2
    assert ring.bytes_backward == (n - 1) * 2 * numbers * (2 + 4)
    assert reduce.bytes_forward == (n - 1) * numbers * (2 + 4)
    assert reduce.bytes_backward == (n - 1) * numbers * (2 * 2 + 4)
    # "auto" chooses by the same numbers.
    x = torch.empty(measure.BATCH, measure.HEADS, 16 // n, measure.DIM, dtype=torch.bfloat16)
    even = Layout.contiguous(16, n)
    problem = SplitProblem(phi=nomax.Phi("relu"), queries=even, keys=even, scale=1.0)
    for backwards in (False, True):
        expected = tuple(each.bytes_forward + backwards * each.bytes_backward for each in (ring, reduce))
        assert sent(problem, x, x, x, backwards) == expected


def overlap(mesh):
    """A block is computed while the next one is on its way, or while queries are gathered."""
    events = []

    def noted(event, function):
        return lambda *inputs, **settings: events.append(event) or function(*inputs, **settings)

    parts = [split(x, mesh, 2) for x in tensors()]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, event in [
            (ranks.Ranks, "pass_on", "send"),
            (ranks.Ranks, "gather", "send"),
            (ranks.Arrival, "wait", "wait"),
            (ranks.Gathering, "wait", "wait"),
            (SplitProblem, "forward", "compute"),
            (SplitProblem, "backward", "compute"),
        ]:
            patch.setattr(owner, name, noted(event, getattr(owner, name)))
        for schedule in SCHEDULES:
            events.clear()
            out = attention(*parts, mesh=mesh, schedule=schedule, layout=Layout.contiguous(LENGTH, mesh.size()))
            forward = list(events)
            events.clear()
            out.sum().backward()
            if mesh.size() > 1:
                assert forward[:3] == events[:3] == ["send", "compute", "wait"]
            if mesh.size() > 2 and schedule == "ring":  # also later on, where gradients follow keys
                assert forward[3:6] == ["send", "compute", "wait"]
                assert events[3:6] == ["send", "compute", "send"]


def dtensors(mesh):
    """DTensors that are sharded by batch, heads, queries or keys; in the last case the output is a partial sum."""
    dtensor.register_operators()
    n, batch = mesh.size(), max(2, mesh.size())
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(3, batch, HEADS, 8, D, generator=generator)
    hidden = {"attn_mask": torch.rand(batch, 1, 1, 8, generator=generator) > 0.4}
    whole_ways = {
        (Shard(0), Shard(0)): Shard(0),
        (Shard(1), Shard(1)): Shard(1),
        (Shard(2), Replicate()): Shard(2),
        (Replicate(), Shard(2)): Partial(),
    }
    for (of_query, of_keys), of_out in whole_ways.items():
        for settings in ({}, hidden, {"is_causal": True}):
            plain = [x.clone().requires_grad_() for x in whole]
            expected = nomax.attention(*plain, **settings)
            weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
            (expected * weight).sum().backward()
            parts = [
                distribute_tensor(x.clone(), mesh, [place]).requires_grad_()
                for x, place in zip(whole, (of_query, of_keys, of_keys), strict=True)
            ]
            with implicit_replication():  # of masks, and of L where queries differ in it
                out = nomax.attention(*parts, **settings)
                (out * distribute_tensor(weight, mesh, [Replicate()])).sum().backward()
            if n > 1 and "is_causal" not in settings:
                assert out.placements == (of_out,)
            close(out.full_tensor(), expected, expected)
            for part, one in zip(parts, plain, strict=True):
                close(part.grad.full_tensor(), one.grad, one.grad)


def mask(rows, keys, bias=False, seed=3):
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(B, 1, rows, keys, generator=generator) > 0.3
    seen[0, :, 0] = False  # a query, or a sequence, that sees nothing
    if not bias:
        return seen
    return torch.randn(B, HEADS, rows, keys, generator=generator).masked_fill(~seen, -torch.inf)


def last_keys_hidden():
    """Ranks other than the first hold no visible key."""
    return (torch.arange(LENGTH) < 5).expand(B, 1, 1, LENGTH)


def cases(mesh) -> dict[str, Callable[[], None]]:
    """Return every case by name."""
    both = {
        "plain": {},
        "sizes that ranks tell each other": {"told": False},
        "uneven": {"make": uneven},
        "causal": {"is_causal": True},
        "causal zigzag": {"is_causal": True, "make": Layout.zigzag},
        "causal uneven with rows": {"is_causal": True, "make": uneven, "return_rows": True},
        "more keys than queries": {"queries": 9, "keys": 25, "is_causal": True},
        "more queries than keys": {"queries": 25, "keys": 9, "is_causal": True, "make": Layout.zigzag},
        "grouped heads": {"key_heads": 2, "enable_gqa": True, "make": uneven},
        "padding": {"attn_mask": mask(1, LENGTH), "make": Layout.zigzag, "return_rows": True},
        "no visible key on most ranks": {"attn_mask": last_keys_hidden(), "return_rows": True},
        "bias of keys": {"attn_mask": mask(1, LENGTH, bias=True), "make": Layout.zigzag},
        "rows": {"return_rows": True, "phi": "1.5*relu/L"},
        "shift by log L": {"phi": "sigmoid(x-log L)", "is_causal": True, "make": Layout.zigzag},
        "threshold by log L": {"phi": "relu2(x+1-0.5*sqrt(2 log L))", "is_causal": True, "make": Layout.zigzag},
        "all keys counted": {"phi": "relu/L, L=keys", "attn_mask": mask(1, LENGTH)},
        "a fixed length": {"phi": "relu/L, L=11", "is_causal": True},
        "linear": {"phi": "identity/L"},
        "other scale": {"phi": "gelu", "scale": 0.3},
        "dropout": {"dropout_p": 0.4},
        "dropout, causal zigzag": {"dropout_p": 0.4, "is_causal": True, "make": Layout.zigzag, "return_rows": True},
        "dropout with padding": {"dropout_p": 0.3, "attn_mask": mask(1, LENGTH), "make": uneven},
        "the reference backend": {"backend": "reference", "is_causal": True, "make": Layout.zigzag},
        "fewer positions than ranks": {"queries": 2, "keys": 3},
    }
    ring = {
        "mask of queries": {"attn_mask": mask(LENGTH, LENGTH), "make": Layout.zigzag, "return_rows": True},
        "bias": {"attn_mask": mask(LENGTH, LENGTH, bias=True), "make": Layout.zigzag},
        "bias, uneven, with dropout": {
            "attn_mask": mask(LENGTH, LENGTH, bias=True), "make": uneven, "dropout_p": 0.2, "return_rows": True
        },
    }  # fmt: skip
    everything: dict[str, Callable[[], None]] = {
        f"{name} ({schedule})": partial(compare, mesh, schedule, **settings)
        for schedule in SCHEDULES
        for name, settings in both.items()
    }
    everything |= {f"{name} (ring)": partial(compare, mesh, "ring", **settings) for name, settings in ring.items()}
    for schedule in SCHEDULES:
        everything[f"half precision ({schedule})"] = partial(half_precision, mesh, schedule)
        everything[f"half precision, longer, with dropout ({schedule})"] = partial(
            half_precision, mesh, schedule, length=197, dropout_p=0.2
        )
        everything[f"doubles ({schedule})"] = partial(doubles, mesh, schedule)
        everything[f"leading dimensions ({schedule})"] = partial(leading_dimensions, mesh, schedule)
    everything["fewest bytes"] = partial(fewest_bytes, mesh)
    everything["whole and parts"] = partial(whole_and_parts, mesh)
    everything["peers"] = partial(peers, mesh)
    everything["exchanges"] = partial(exchanges, mesh)
    everything["overlap"] = partial(overlap, mesh)
    everything["DTensors"] = partial(dtensors, mesh)
    everything["refused"] = partial(refused, mesh)
    return everything
