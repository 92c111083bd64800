"""Participants in races of one attention call: the named shapes and their tensors, our operation, and its peers.

B batch entries, H heads, L queries, K keys and D dimensions of a head.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nomax
from nomax.ops import build
from nomax.phi import ACTIVATIONS, Phi

FORWARD, BACKWARD, INFERENCE = "forward", "forward + backward", "inference mode"
OURS, UNCAUSAL = "relu/L", "relu/L, not causal"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """A kind of call, by name."""

    name: str
    note: str
    batch: int
    num_heads: int
    queries: int
    keys: int
    head_dim: int = 64
    causal: bool = False
    padded: bool = False
    positive: bool = False  # query and key, and so all scores: no weight is zero
    modes: tuple[str, ...] = (FORWARD, BACKWARD)

    def shrunk(self) -> "Shape":
        """Return the same kind of shape, so small that its speed means nothing: for smoke runs."""
        small = {name: min(getattr(self, name), 9) for name in ("queries", "keys")}
        return replace(self, batch=min(self.batch, 2), num_heads=min(self.num_heads, 2), head_dim=8, **small)

    @property
    def reads(self) -> bool:
        """Whether reading keys and values takes the time, and not arithmetic."""
        return self.queries == 1 < self.keys

    def lengths(self) -> list[int]:
        """Return the number of keys of each batch entry: all, or, when padded, from about 0.3 of them to all."""
        if not self.padded:
            return [self.keys] * self.batch
        return [round(self.keys * float(share)) for share in torch.linspace(0.3, 1, self.batch)]

    def flop(self, mode: str) -> float:
        """Count the operations on visible keys; the backward's five products count 2.5 times the forward's two."""
        rows = range(1, self.queries + 1)
        pairs = sum(sum(min(row, n) for row in rows) if self.causal else self.queries * n for n in self.lengths())
        return 4.0 * self.num_heads * self.head_dim * pairs * (3.5 if mode == BACKWARD else 1)

    def flash_flop(self, mode: str) -> float:
        """Count the operations by FlashAttention's formula: half of the pairs if causal, padding included."""
        pairs = self.batch * self.queries * self.keys / (2 if self.causal else 1)
        return 4.0 * self.num_heads * self.head_dim * pairs * (3.5 if mode == BACKWARD else 1)

    def sizes(self) -> str:
        """Return B×H×L(×K)×D."""
        keys = () if self.keys == self.queries else (self.keys,)
        return "×".join(map(str, (self.batch, self.num_heads, self.queries, *keys, self.head_dim)))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("S/32", "ViT-S/32 at 224 pixels", 64, 6, 50, 50),
        Shape("S/16", "ViT-S/16", 16, 6, 197, 197),
        Shape("S/8", "ViT-S/8", 4, 6, 785, 785),
        Shape("B/16", "ViT-B/16", 8, 12, 197, 197),
        Shape("long-2049", "one long sequence", 1, 6, 2049, 2049),
        Shape("long-4096", "one longer sequence", 1, 6, 4096, 4096),
        Shape("causal-1024", "a causal decoder", 1, 8, 1024, 1024, causal=True),
        Shape("padded", "ViT-S/16's shape, sequences 0.3 to 1 of its length", 16, 6, 197, 197, padded=True),
        Shape("decode", "one step of cached decoding", 8, 8, 1, 2048, positive=True, modes=(FORWARD,)),
        Shape("tiny", "the cost of a call", 1, 1, 1, 1, modes=(FORWARD, INFERENCE, BACKWARD)),
    )
}


# Sixteen thousand positions, as in FlashAttention's tables, and a vision transformer.
GPU_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gpu-2k", "2,048 positions", 8, 32, 2048, 2048),
        Shape("gpu-16k", "16,384 positions", 1, 32, 16384, 16384),
        Shape("gpu-2k-128", "2,048 positions, wide heads", 8, 16, 2048, 2048, 128),
        Shape("gpu-16k-128", "16,384 positions, wide heads", 1, 16, 16384, 16384, 128),
        Shape("gpu-2k-causal", "2,048 positions, causal", 8, 32, 2048, 2048, causal=True),
        Shape("gpu-16k-causal", "16,384 positions, causal", 1, 16, 16384, 16384, 128, causal=True),
        Shape("gpu-vit", "ViT-B/16 at 224 pixels", 64, 12, 197, 197),
    )
}


@dataclass(frozen=True)
class Inputs:
    """The inputs of every participant: contiguous tensors, and the mask in the forms that peers need."""

    query: Tensor  # [B, H, L, D]
    key: Tensor  # [B, H, K, D]
    value: Tensor  # [B, H, K, D]
    grad: Tensor  # [B, H, L, D], the gradient that arrives at the output
    _: KW_ONLY
    lengths: Tensor | None  # [B], when padded
    causal: bool

    @property
    def mask(self) -> Tensor | None:
        """[B, 1, 1, K], True for keys that a query may see; None if only the causal rule or nothing hides keys."""
        if self.lengths is None:
            return None
        return torch.arange(self.key.shape[2], device=self.key.device) < self.lengths[:, None, None, None]

    @property
    def hidden(self) -> Tensor | None:
        """True for keys that a query may not see, broadcastable to [B, H, L, K]."""
        if self.causal:
            queries, keys = self.query.shape[2], self.key.shape[2]
            return torch.ones(queries, keys, dtype=torch.bool, device=self.query.device).triu(1)
        return None if self.mask is None else ~self.mask

    @property
    def visible(self) -> Tensor | int:
        """The number of keys that each query may see: L of φ."""
        if self.hidden is None:
            return self.key.shape[2]
        return (~self.hidden).sum(-1, keepdim=True).float()

    def parts(self) -> Iterator[tuple[int, slice, "Inputs"]]:
        """Yield one batch entry and a few heads at a time, so that a whole matrix of weights fits into memory."""
        batch, num_heads, queries, _ = self.query.shape
        step = max(1, 2**23 // (queries * self.key.shape[2]))
        for entry in range(batch):
            for first in range(0, num_heads, step):
                heads = slice(first, first + step)
                tensors = (x[entry : entry + 1, heads] for x in (self.query, self.key, self.value, self.grad))
                lengths = None if self.lengths is None else self.lengths[entry : entry + 1]
                yield entry, heads, Inputs(*tensors, lengths=lengths, causal=self.causal)

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Return the same values in another precision."""
        tensors = (x.to(dtype) for x in (self.query, self.key, self.value, self.grad))
        return Inputs(*tensors, lengths=self.lengths, causal=self.causal)


def make_inputs(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Return standard normal tensors, the same in every run.

    Query and key are rounded to multiples of 1/8, so that every precision sums their products without error: else a
    score near zero would be positive in one and negative in the other, and relu's gradient there all or nothing.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = (shape.queries, shape.keys, shape.keys, shape.queries)
    query, key, value, grad = (
        torch.randn(shape.batch, shape.num_heads, size, shape.head_dim, generator=generator) for size in sizes
    )
    if shape.positive:
        query, key = query.abs(), key.abs()
    tensors = ((query * 8).round() / 8, (key * 8).round() / 8, value, grad)
    lengths = torch.tensor(shape.lengths(), device=device) if shape.padded else None
    return Inputs(*(x.to(device, dtype) for x in tensors), lengths=lengths, causal=shape.causal)


def ours(inputs: Inputs, phi: str) -> Attention:
    """Return our operation through its public API, on the backend under test."""
    # Looked up now and not at import: a test replaces it.
    backend = "cpu" if inputs.query.is_cpu else "triton"
    return partial(nomax.attention, attn_mask=inputs.mask, is_causal=inputs.causal, phi=phi, backend=backend)


def sdpa(inputs: Inputs) -> Attention:
    """Return PyTorch's softmax attention."""
    return partial(F.scaled_dot_product_attention, attn_mask=inputs.mask, is_causal=inputs.causal)


def eager(inputs: Inputs, phi: str = OURS) -> Attention:
    """Return the formula as one would write it in PyTorch; in float64 it is also the standard of correctness."""
    activation = ACTIVATIONS[Phi.parse(phi).activation].value
    hidden, visible, scale = inputs.hidden, inputs.visible, inputs.query.shape[-1] ** -0.5

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = activation(query @ key.mT * scale)
        if hidden is not None:
            weights = weights.masked_fill(hidden, 0)
        return (weights @ value / visible).to(query.dtype)

    return attention


def step(attention: Attention, inputs: Inputs, mode: str) -> Call:
    """Return the call that is timed: the output alone, or with the gradients of query, key and value."""
    tensors = (inputs.query, inputs.key, inputs.value)
    if mode != BACKWARD:
        return lambda: attention(*tensors)
    leaves = [x.detach().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(attention(*leaves), leaves, inputs.grad)


@dataclass(frozen=True)
class Peer:
    """A peer: how to prepare its call, what it can do, and whether it computes relu/L (so that it can be checked).

    Whatever it can prepare beforehand (masks, padded copies, compilation) is not part of the measured time.
    """

    prepare: Callable[[Inputs, str, str], Call]  # inputs, mode, torch.compile's backend
    modes: tuple[str, ...] = (FORWARD, BACKWARD, INFERENCE)
    computes_relu: bool = False


def _compiled(inputs: Inputs, mode: str, compiler: str) -> Call:
    return step(torch.compile(eager(inputs), backend=compiler, dynamic=False, fullgraph=True), inputs, mode)


def _flex(inputs: Inputs, mode: str, compiler: str) -> Call:
    """Prepare FlexAttention in log space: its softmax of log(relu(score)) has relu as numerator.

    To undo the denominator one needs the log-sum-exp, which FlexAttention does not return on CPUs. So a first key of
    weight 1 is put before the others, and a value column that is 1 there and 0 elsewhere: that column of the output is
    1 / denominator.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, _, queries, head_dim = inputs.query.shape
    keys, visible, lengths = inputs.key.shape[2], inputs.visible, inputs.lengths
    key = F.pad(inputs.key, (0, 0, 1, 0))
    value = F.pad(inputs.value, (0, 16, 1, 0))  # one column would do, but its kernel is faster on a multiple of 16
    value[:, :, 0, head_dim] = 1

    def log_relu(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j == 0, 0.0, torch.log(torch.relu(score)))

    blocks: Any = None
    device = inputs.query.device.type
    if inputs.causal:
        blocks = create_block_mask(lambda b, h, i, j: j <= i + 1, None, None, queries, keys + 1, device=device)
    elif lengths is not None:
        blocks = create_block_mask(lambda b, h, i, j: j <= lengths[b], batch, None, queries, keys + 1, device=device)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flex_attention(query, key, value, score_mod=log_relu, block_mask=blocks)
        return (out[..., :head_dim] / (out[..., head_dim : head_dim + 1] * visible)).to(query.dtype)

    return partial(torch.compile(attention, backend=compiler, dynamic=False), inputs.query, key, value)


# The most that one core can do: fused multiply-adds in float32, and nothing else.
PEAK_ROUNDS = 1_000_000
PEAK_SUMS = 12  # more than the latency × throughput of any core's multiply-adds, and they still fit into the registers
PEAK_SOURCE = """
#if defined(__AVX512F__)
typedef float vector __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float vector __attribute__((vector_size(32)));
#else
typedef float vector __attribute__((vector_size(16)));
#endif
extern "C" int width() { return sizeof(vector) / sizeof(float); }
extern "C" float spin(long rounds, float factor, float summand) {
    vector sums[SUMS], factors = vector{} + factor, summands = vector{} + summand;
    // Different starts, or the compiler would see that all sums are the same one.
    for (int i = 0; i < SUMS; ++i) sums[i] = vector{} + i * summand;
    while (rounds--)
        for (vector& sum : sums) sum = sum * factors + summands;
    for (vector& sum : sums) sums[0] += sum;
    return sums[0][0];
}
"""


def peak_flop() -> float:
    """Return the floating point operations of one call of the peer "peak"."""
    return 2.0 * PEAK_SUMS * PEAK_ROUNDS * int(_peak_library().width())


@cache
def _peak_library() -> ctypes.CDLL:
    flags = ["-O3", "-march=native", "-ffp-contract=fast", f"-DSUMS={PEAK_SUMS}", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "peak.cpp"), Path(folder, "peak.so")
        source.write_text(PEAK_SOURCE)
        subprocess.run([*build._compiler(), *flags, str(source), "-o", str(target)], check=True, capture_output=True)
        library = ctypes.CDLL(str(target))
    library.spin.argtypes = [ctypes.c_long, ctypes.c_float, ctypes.c_float]
    library.spin.restype = ctypes.c_float
    return library


PEERS = {
    "sdpa": Peer(lambda inputs, mode, _: step(sdpa(inputs), inputs, mode)),
    "eager": Peer(lambda inputs, mode, _: step(eager(inputs), inputs, mode), computes_relu=True),
    "compiled": Peer(_compiled, computes_relu=True),
    "flex": Peer(_flex, (FORWARD,), computes_relu=True),
    "peak": Peer(lambda *_: partial(_peak_library().spin, PEAK_ROUNDS, 0.999, 0.001), (FORWARD,)),
}
