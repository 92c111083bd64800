"""ReLUFormer by its formulas, in float64 and sentence by sentence, and small models to compare with it."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from nomax.models import ReLUFormer

SMALL = {
    "vocabulary": 13,
    "dim": 12,
    "heads": 3,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "slots": 7,
    "max_length": 20,
}
# Every transformer that ReLUFormer is compared with.
KINDS = {
    "ReLUFormer": {},
    "one gain per layer": {"learned_gain": "layer"},
    "γ fixed": {"learned_gain": None, "gamma": 2.5},
    "softmax": {"phi": "softmax", "learned_gain": None},
    "ReLU put in directly": {"phi": "relu", "learned_gain": None},
    "relu/L": {"phi": "relu/L", "learned_gain": None},
    "sparsemax": {"phi": "sparsemax", "learned_gain": None},
    "entmax": {"phi": "entmax15", "learned_gain": None},
    "ReLA": {"phi": "relu", "learned_gain": None, "joined_norm": "rela"},
    "softmax memory": {"memory_phi": "softmax"},
    "softmax memory with a norm": {"memory_phi": "softmax", "memory_norm": True},
    "post-norm": {"norm": "post"},
    "rotary": {"positions": "rotary"},
    "post-norm, rotary, softmax": {"norm": "post", "positions": "rotary", "phi": "softmax", "learned_gain": None},
}


def made(**changes: object) -> ReLUFormer:
    """A small model, every parameter away from where it starts, so that none of them can be left out unnoticed."""
    model = ReLUFormer(**{**SMALL, **changes})
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.4)
        if name.endswith("gain"):
            nn.init.uniform_(parameter, 0.5, 2)
    return model.eval()


def padded(*texts: list[int]) -> Tensor:
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts])


SOURCES = [[5, 4, 9, 12, 7, 2], [3, 2], [8, 8, 11, 2]]
TARGETS = [[1, 6, 6], [1, 3, 10, 5, 9], [1]]


class Formulas:
    """The same model in float64, one sentence at a time and without padding, from the formulas."""

    def __init__(self, model: ReLUFormer) -> None:
        self.config = model.config
        self.state = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
        self.penalties: dict[str, list[tuple[np.ndarray, ...]]] = {}
        self.sizes: dict[str, list[np.ndarray]] = {}  # of the weights of memories

    def linear(self, x: np.ndarray, name: str, part: int = 0, parts: int = 1) -> np.ndarray:
        weight, bias = (np.split(self.state[f"{name}.{kind}"], parts)[part] for kind in ("weight", "bias"))
        return x @ weight.T + bias

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return y * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def weights(self, scores: np.ndarray, seen: np.ndarray, name: str) -> np.ndarray:
        """φ of scores [heads, queries, keys]."""
        n = seen.sum(-1, keepdims=True)
        if self.config.phi == "softmax":
            powers = np.exp(scores - scores.max()) * seen
            return powers / powers.sum(-1, keepdims=True)
        if self.config.phi in ("sparsemax", "entmax15"):
            pairs = [zip(head, n[:, 0], strict=True) for head in scores]
            return np.stack([[_sparse(row[:k], len(row), self.config.phi) for row, k in pair] for pair in pairs])
        weights = np.maximum(scores, 0) * seen
        if self.config.phi == "relu/L":
            return weights / n
        if self.config.phi == "relu":
            return weights
        if self.config.learned_gain is None:
            return weights / (self.config.gamma * np.sqrt(n / 2))
        gain = self.state[f"{name}.gain"].reshape(-1, 1, 1)  # √2/γ, where it is learned
        return gain * weights / np.sqrt(n)

    def attention(self, x: np.ndarray, context: np.ndarray | None, name: str, causal: bool) -> np.ndarray:
        if context is None:
            q, k, v = (self.linear(x, f"{name}.qkv", i, 3) for i in range(3))
        else:
            q, k, v = self.linear(x, f"{name}.q"), *(self.linear(context, f"{name}.kv", i, 2) for i in range(2))
        q, k, v = (y.reshape(len(y), self.config.heads, -1).swapaxes(0, 1) for y in (q, k, v))
        if context is None and self.config.positions == "rotary":
            q, k = _turned(q), _turned(k)
        seen = np.ones((q.shape[1], k.shape[1]), bool)
        a = self.weights(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]), np.tril(seen) if causal else seen, name)
        n = (np.tril(seen) if causal else seen).sum(-1)
        entropy = -(a * np.log(np.where(a > 0, a, 1))).sum(-1)
        excess = np.maximum(entropy - 0.7 * np.log(n), 0)
        with np.errstate(divide="ignore"):
            self.penalties.setdefault(name, []).append((np.abs(np.log(a.sum(-1))), excess, np.abs(a).sum(-1)))
        joined = (a @ v).swapaxes(0, 1).reshape(len(x), -1)
        if self.config.joined_norm == "rela":
            scale, gate = self.state[f"{name}.joined_norm.scale"], self.state[f"{name}.joined_norm.gate"]
            rms = np.sqrt((joined**2).mean(-1, keepdims=True) + 1e-8)
            joined = scale * joined / rms / (1 + np.exp(-gate * joined))
        return self.linear(joined, f"{name}.out")

    def memory(self, x: np.ndarray, name: str) -> np.ndarray:
        scores = x @ self.state[f"{name}.keys"].T
        weights = np.maximum(scores, 0)
        if self.config.memory_phi == "softmax":
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        self.sizes.setdefault(name, []).append(np.abs(weights).sum(-1))
        out = weights @ self.state[f"{name}.values"]
        return self.norm(out, f"{name}.norm") if self.config.memory_norm else out

    def embedded(self, tokens: list[int]) -> np.ndarray:
        dim = self.config.dim
        x = self.state["embedding.weight"][tokens] * math.sqrt(dim)
        if self.config.positions == "sinusoidal":
            angles = [[p / 10_000 ** (2 * i / dim) for i in range(dim // 2)] for p in range(len(tokens))]
            x = x + np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float32)  # as the model keeps them
        return x

    def layers(self, x: np.ndarray, side: str, count: int, context: np.ndarray | None = None) -> np.ndarray:
        for i in range(count):
            parts = [("attention", lambda y, name: self.attention(y, None, name, side == "decoder"))]
            if context is not None:
                parts.append(("source_attention", lambda y, name: self.attention(y, context, name, False)))
            parts.append(("memory", self.memory))
            for name, part in parts:
                norm, full = f"{side}.{i}.{name.replace('_attention', '')}_norm", f"{side}.{i}.{name}"
                if self.config.norm == "pre":
                    x = x + part(self.norm(x, norm), full)
                else:
                    x = self.norm(x + part(x, full), norm)
        return self.norm(x, f"{side}_norm") if self.config.norm == "pre" else x

    def logits(self, source: list[int] | None, target: list[int]) -> np.ndarray:
        context = None
        if source is not None:
            context = self.layers(self.embedded(source), "encoder", self.config.encoder_layers)
        x = self.layers(self.embedded(target), "decoder", self.config.decoder_layers, context)
        return x @ self.state["embedding.weight"].T

    def mean_penalties(self) -> list[float]:
        """Over all rows and heads of an attention, then over attentions; and over all tokens of memories."""
        means = [
            [np.concatenate([sentence[i].ravel() for sentence in rows]).mean() for i in range(3)]
            for rows in self.penalties.values()
        ]
        sizes = [np.concatenate(sentences).mean() for sentences in self.sizes.values()]
        return [float(x) for x in (*np.mean(means, 0), np.mean(sizes))]


def _turned(x: np.ndarray) -> np.ndarray:
    """Rotary positions as complex numbers: pair i, of dimensions i and i + D/2, times exp(i · position · frequency)."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** -(np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(x.shape[1])[:, None] * frequency)
    return np.concatenate([z.real, z.imag], -1)


def _sparse(scores: np.ndarray, length: int, phi: str) -> np.ndarray:
    """sparsemax or 1.5-entmax of the scores by bisection for their threshold, then zeros up to a length."""
    power, scores = (1, scores) if phi == "sparsemax" else (2, scores / 2)
    low, high = scores.max() - 1, scores.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (np.maximum(scores - middle, 0) ** power).sum() > 1 else (low, middle)
    return np.pad(np.maximum(scores - low, 0) ** power, (0, length - len(scores)))
