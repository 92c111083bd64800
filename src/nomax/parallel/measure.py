"""What sequence parallelism costs softmax and relu/L: exchanges, bytes, time, error, and a model of larger machines.

`nomax study sequence-parallel` runs all of it, and judges the claim that relu/L needs fewer gathers.
"""

import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from nomax.parallel.layout import Layout
from nomax.parallel.peers import PHI, WAYS, flash
from nomax.parallel.split_problem import SplitProblem
from nomax.phi import SOFTMAX, Phi

BATCH, HEADS, DIM = 1, 4, 64
COUNTED, TIMED = 64, 2048  # positions of a sequence where exchanges are counted, and where times are taken
MOST_RANKS = 16  # of rings whose error is simulated

# What an exchange is, by torch's names: (kind, the bytes that a rank sends over those of its input, by ranks).
_EXCHANGES = {
    "send": ("message", lambda ranks: 1.0),
    "all_to_all": ("message", lambda ranks: 1.0),  # by this name, torch's ring passes on one message
    "alltoall": ("all-to-all", lambda ranks: (ranks - 1) / ranks),
    "allgather": ("gather", lambda ranks: ranks - 1.0),
    "all_gather": ("gather", lambda ranks: ranks - 1.0),
    "reduce_scatter": ("reduce-scatter", lambda ranks: (ranks - 1) / ranks),
}
KINDS = ("gather", "reduce-scatter", "all-to-all", "message")


class Traffic(TorchDispatchMode):
    """Count the exchanges of this rank with others, and the bytes that it sends. Each is waited for."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.exchanges, self.sent = ranks, Counter[str](), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if self.ranks > 1 and namespace in ("c10d", "_c10d_functional"):
            plain = name.strip("_")
            for known, (kind, share) in _EXCHANGES.items():
                if plain.startswith(known):
                    given = args[1] if namespace == "c10d" and known not in ("send",) else args[0]
                    tensors = given if isinstance(given, list | tuple) else [given]
                    self.exchanges[kind] += 1
                    self.sent += share(self.ranks) * sum(x.numel() * x.element_size() for x in tensors)
                    break
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Cost:
    """What one attention costs a rank, forwards and backwards."""

    phi: str
    schedule: str
    ranks: int
    length: int
    forward: dict[str, int]  # exchanges by kind
    backward: dict[str, int]
    bytes_forward: float
    bytes_backward: float
    seconds: tuple[float, ...] = ()  # of both passes, in each round

    @property
    def exchanges(self) -> int:
        """All exchanges of both passes."""
        return sum(self.forward.values()) + sum(self.backward.values())


def costs(ranks: int, length: int = COUNTED, rounds: int = 0, dtype: str = "bfloat16") -> list[Cost]:
    """Count what every way costs among so many local ranks, and take the time of some rounds, in which they take turns.

    Times mean something only where each rank has a core of its own, and nothing else runs.
    """
    if length % ranks:
        raise ValueError(f"length={length} must be a multiple of ranks={ranks}.")
    with tempfile.TemporaryDirectory() as folder:
        inputs = (ranks, length, rounds, dtype, folder)
        start_processes(_rank, inputs, ranks, start_method="spawn")
        return [Cost(**each) for each in json.loads(Path(folder, "costs.json").read_text())]


def counted(mesh: DeviceMesh, length: int, dtype: str) -> list[Cost]:
    """Count the exchanges of every way in one call, forwards and backwards."""
    ranks = mesh.size()
    *inputs, grad = _inputs(mesh, length, dtype)
    results = []
    for (phi, schedule), way in WAYS.items():
        tensors = [x.clone().requires_grad_() for x in inputs]
        with Traffic(ranks) as forward:
            out = way(tensors[0], tensors[1], tensors[2], mesh)
        with Traffic(ranks) as backward:
            out.backward(grad)
        counts = [{kind: each.exchanges[kind] for kind in KINDS} for each in (forward, backward)]
        results.append(Cost(phi, schedule, ranks, length, counts[0], counts[1], forward.sent, backward.sent))
    return results


def _inputs(mesh: DeviceMesh, length: int, dtype: str) -> tuple[Tensor, ...]:
    """Return this rank's query, key and value, and a gradient of the output."""
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    shape = (4, BATCH, HEADS, length // mesh.size(), DIM)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).unbind(0)


def _rank(rank: int, ranks: int, length: int, rounds: int, dtype: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("sequence",))
    results = counted(mesh, length, dtype)
    *inputs, grad = _inputs(mesh, length, dtype)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in WAYS}
    for _ in range(rounds and rounds + 1):
        for key, way in WAYS.items():
            tensors = [x.clone().requires_grad_() for x in inputs]
            dist.barrier()
            start = time.perf_counter()
            way(tensors[0], tensors[1], tensors[2], mesh).backward(grad)
            dist.barrier()
            seconds[key].append(time.perf_counter() - start)
    if rank == 0:  # the first round warms up
        rows = [asdict(cost) | {"seconds": seconds[cost.phi, cost.schedule][1:]} for cost in results]
        Path(folder, "costs.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


ROUNDED, KEPT, EXACT = "parts in bfloat16", "parts in float32", "all in float32"


def errors(length: int = 1024, most: int = MOST_RANKS, seeds: Sequence[int] = range(3)) -> dict[str, dict[int, float]]:
    """Return the relative error of a ring in bfloat16, by φ, precision of parts and number of (simulated) ranks.

    It is the norm of the difference from float64 over that of the result. torch's ring rounds parts to bfloat16, ours
    keeps their sums in float32, and so both φ are computed also with everything in float32 until the end, to tell what
    comes from the φ and what from the precision. Softmax's parts are merged by torch's own class.
    """
    from torch.distributed.tensor.experimental._context_parallel._attention import _SDPAMerger

    rings = [2**i for i in range(int(math.log2(most)) + 1)]
    norms: dict[str, dict[int, list[float]]] = {}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        query, key, value = torch.randn(3, BATCH, HEADS, length, DIM, generator=generator).bfloat16().unbind(0)
        scores = query.double() @ key.double().transpose(-2, -1) / math.sqrt(DIM)
        exact = {SOFTMAX: scores.softmax(-1) @ value.double(), PHI: scores.relu() @ value.double() / length}
        for ranks in rings:
            layout = Layout.contiguous(length, ranks)
            problem = SplitProblem(phi=Phi.parse(PHI), queries=Layout.sized([length]), keys=layout, scale=DIM**-0.5)
            for precision in (ROUNDED, KEPT, EXACT):
                dtype = torch.float32 if precision == EXACT else torch.bfloat16
                sums, merger = problem.sums(query, value), _SDPAMerger(convert_to_f32=True, seq_dim=2)
                for rank in range(ranks):
                    inputs = [x.to(dtype) for x in (query, *(layout.local(x, rank, 2) for x in (key, value)))]
                    one = problem.sums(query, value)
                    problem.forward(one, inputs[0], inputs[1], inputs[2], (0, rank))
                    sums.all += one.all.to(torch.bfloat16) if precision == ROUNDED else one.all
                    merger.step(*flash(*inputs), partial=False)
                outs = {PHI: sums.all.bfloat16(), SOFTMAX: merger.results()[0].bfloat16()}
                if precision == KEPT:  # softmax's kernel has no such way
                    del outs[SOFTMAX]
                for phi, out in outs.items():
                    error = float((out.double() - exact[phi]).norm() / exact[phi].norm())
                    norms.setdefault(f"{phi}, {precision}", {}).setdefault(ranks, []).append(error)
    return {name: {ranks: statistics.fmean(each) for ranks, each in line.items()} for name, line in norms.items()}


@dataclass(frozen=True)
class Machine:
    """Devices, and the links between them: assumed figures, not measured ones."""

    flops: float = 400e12  # of attention in bfloat16, per second and device: about half of an H100's peak
    bandwidth: float = 50e9  # bytes per second that a device can send: one 400 Gbit/s link
    latency: float = 10e-6  # seconds until a message arrives


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model, in bfloat16: causality, which halves everything, is left out."""

    length: int = 131_072
    heads: int = 32
    key_heads: int = 32
    dim: int = 128


def modelled(layer: Layer, ranks: int, machine: Machine | None = None) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the seconds of computing and of waiting, forwards and backwards, by φ and schedule.

    A ring waits where a message takes longer than the block that is computed meanwhile. Collectives are not hidden,
    send their bytes over one link, and take log₂(ranks) latencies. Merging softmax's results is counted as free, and an
    all-to-all as a reduce-scatter of the same bytes.
    """
    machine = machine or Machine()
    block = (
        4 * layer.length**2 * layer.heads * layer.dim / ranks**2 / machine.flops
    )  # of forward; backward is 2.5 times
    keys = 2 * layer.length * layer.key_heads * layer.dim / ranks  # numbers of a rank's keys and values
    queries = layer.length * layer.heads * layer.dim / ranks

    def ring(passes: Sequence[tuple[float, float]]) -> float:
        steps = ((sent / machine.bandwidth + machine.latency, compute) for sent, compute in passes)
        return sum((ranks - 1) * max(message - compute, 0.0) for message, compute in steps)

    def collectives(*sent: float) -> float:
        hops = machine.latency * math.ceil(math.log2(ranks))
        return sum((ranks - 1) * each / machine.bandwidth + hops for each in sent)

    rows = 4 * layer.length * layer.heads / ranks  # bytes of one number for each row
    compute = 3.5 * block * ranks
    reduce = (2 * queries, 4 * queries, 4 * queries, 4 * queries)  # q; out; q and its gradient; dq
    waits = {
        (SOFTMAX, "keys travel"): ring([(2 * keys, block), (6 * keys, 2.5 * block)]),
        (SOFTMAX, "keys gathered"): collectives(2 * keys, 4 * keys),
        # Its rows' sums travel with partial outputs, and they and Σ out·grad with queries and gradients.
        (SOFTMAX, "keys stay"): collectives(reduce[0], reduce[1] + rows, reduce[2] + 2 * rows, reduce[3]),
        (PHI, "keys travel"): ring([(2 * keys, block), (6 * keys, 2.5 * block)]),
        (PHI, "keys gathered"): collectives(2 * keys, 4 * keys),
        (PHI, "keys stay"): collectives(*reduce),
    }
    return {way: (compute, wait) for way, wait in waits.items()}


MODELLED = (8, 64, 512)
LAYERS: Mapping[str, Layer] = {
    "131,072 positions": Layer(),
    "131,072 positions, 8 key heads": Layer(key_heads=8),
    "1,048,576 positions": Layer(length=1_048_576),
}
