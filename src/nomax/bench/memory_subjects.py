"""Who takes part in `nomax bench memory`: nn.Memory, and what one would write instead; both in time and in bytes.

python -m nomax.bench.memory_subjects Memory relu 65536 1024 256      the bytes that a training call takes
"""

import json
import sys
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from nomax.bench.gate import Gate
from nomax.bench.memory import Memory, in_a_fresh_process, rise
from nomax.nn import Memory as MemoryLayer

INFERENCE: Literal["inference"] = "inference"
TRAINING: Literal["training"] = "training"
MODES = (INFERENCE, TRAINING)
OURS, PLAIN = "Memory", "plain"
FEW, MANY = (1024, 4096), 65_536
TOKENS = (1024, 4096)


class Plain(nn.Module):
    """The three lines."""

    def __init__(self, layer: MemoryLayer) -> None:
        super().__init__()
        self.keys, self.values, self.phi = layer.keys, layer.values, str(layer.phi)

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.keys.T
        weights = scores.relu() if self.phi == "relu" else scores.softmax(-1)
        return weights @ self.values


def shape(phi: str, slots: int, tokens: int) -> str:
    """The name of a case."""
    return f"{phi}, {slots:,} slots, {tokens:,} tokens"


def layers(phi: str, slots: int, dim: int, block: int | None = None) -> dict[str, nn.Module]:
    """Both, with the same keys and values."""
    torch.manual_seed(0)
    layer = MemoryLayer(dim, slots, phi=phi, block=block)
    return {OURS: layer, PLAIN: Plain(layer)}


def call(layer: nn.Module, x: Tensor, mode: str) -> Callable[[], None]:
    """What is timed."""
    x = x.detach().requires_grad_(mode == TRAINING)
    grad = torch.randn_like(x)

    def inference() -> None:
        with torch.inference_mode():
            layer(x)

    def training() -> None:
        torch.autograd.grad(layer(x), [x, *layer.parameters()], grad)

    return inference if mode == INFERENCE else training


def check(phi: str, slots: int, dim: int, toy: bool) -> Gate:
    """Results and gradients against float64, of a few tokens, in blocks even where so few would need none."""
    gate = Gate("float32", name=phi)
    participants = layers(phi, slots, dim, block=max(slots // 8, 1))
    x, grad = (torch.randn(7 if toy else 37, dim) for _ in range(2))
    names = ("output", "gradient of x", "gradient of keys", "gradient of values")
    try:
        mine, plain = (_results(participants[who], x, grad) for who in (OURS, PLAIN))
        exact = _results(participants[PLAIN].double(), x.double(), grad.double())
    except Exception as error:  # a crash is a wrong result too, and the other sizes are still worth measuring
        gate.failure = f"{type(error).__name__}: {error}"
        return gate
    for name, found, peer, want in zip(names, mine, plain, exact, strict=True):
        gate.error[name] = float((found - want).abs().max())
        rounding = torch.finfo(torch.float32).eps * float(want.abs().max())
        gate.allowed[name] = max(2 * float((peer - want).abs().max()), rounding)
    gate.green = all(gate.error[name] <= gate.allowed[name] for name in gate.error)  # a NaN fails
    return gate


def _results(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], grad)]


def measured(phi: str, slots: int, tokens: int, dim: int) -> list[Memory]:
    """What a training call takes at its peak, ours as a share of the plain one, each in a process of its own."""
    found = {}
    for who in (OURS, PLAIN):
        arguments = (who, phi, *map(str, (slots, tokens, dim)))
        found[who] = in_a_fresh_process("nomax.bench.memory_subjects", *arguments)
    mine, plain = found[OURS], found[PLAIN]
    failures = [size for size in (mine, plain) if isinstance(size, str)]
    if isinstance(mine, str) or isinstance(plain, str):
        return [Memory(phi, TRAINING, tokens, failure=failures[0], unit="tokens")]
    return [
        Memory(phi, TRAINING, tokens, mine, mine / max(plain, 1), unit="tokens"),
        Memory(f"{phi}, plain", TRAINING, tokens, plain, unit="tokens"),
    ]


def _bytes(who: str, phi: str, slots: int, tokens: int, dim: int) -> int:
    torch.set_num_threads(1)
    call(layers(phi, 8, dim)[who], torch.randn(8, dim), TRAINING)()  # what comes with the first call does not count
    layer = layers(phi, slots, dim)[who]
    return rise(call(layer, torch.randn(tokens, dim), TRAINING))


if __name__ == "__main__":
    print(json.dumps(_bytes(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
