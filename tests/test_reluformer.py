"""ReLUFormer against its formulas in float64, against torch's own transformer, and against itself in other batches."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nomax import models
from nomax.models import ReLUFormer, ReLUFormerConfig

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
        self.penalties: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

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
            self.penalties.setdefault(name, []).append((np.abs(np.log(a.sum(-1))), excess))
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
        """Over all rows and heads of an attention, then over attentions."""
        means = [
            [np.concatenate([sentence[i].ravel() for sentence in rows]).mean() for i in range(2)]
            for rows in self.penalties.values()
        ]
        return [float(x) for x in np.mean(means, 0)]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_padded_batch_gives_what_the_formulas_give_for_each_sentence(kind: str, dtype: torch.dtype) -> None:
    model = made(**KINDS[kind]).to(dtype)
    logits = model(padded(*SOURCES), padded(*TARGETS))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    for i, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        want = torch.from_numpy(Formulas(model).logits(source, target))
        torch.testing.assert_close(logits[i, : len(target)].double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_is_the_decoder_alone(kind: str) -> None:
    model = made(encoder_layers=0, **KINDS[kind]).double()
    assert not any("source" in name or "encoder" in name for name, _ in model.named_parameters())
    logits = model(padded(*TARGETS))
    for i, target in enumerate(TARGETS):
        want = torch.from_numpy(Formulas(model).logits(None, target))
        torch.testing.assert_close(logits[i, : len(target)], want, rtol=1e-9, atol=1e-9)


def test_penalties_are_means_over_tokens_and_heads_and_then_over_attentions() -> None:
    model = made().double().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("qkv.bias", "q.bias", "kv.bias")):
                parameter[: 2 * 12] = 1.5  # queries and keys that agree, so that no row of weights is empty
    logits, found = model(padded(*SOURCES), padded(*TARGETS), penalties=True)
    torch.testing.assert_close(logits, model(padded(*SOURCES), padded(*TARGETS)))
    formulas = Formulas(model)
    for source, target in zip(SOURCES, TARGETS, strict=True):
        formulas.logits(source, target)
    assert len(formulas.penalties) == 2 + 2 + 2
    assert [float(found.normalisation), float(found.entropy)] == pytest.approx(formulas.mean_penalties(), rel=1e-9)
    assert min(found) > 0


def test_padding_is_in_no_penalty_of_a_language_model() -> None:
    model = made(encoder_layers=0).double()
    found = model(padded(*TARGETS), penalties=True)[1]
    wider = model(nn.functional.pad(padded(*TARGETS), (0, 4)), penalties=True)[1]
    torch.testing.assert_close(tuple(wider), tuple(found))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_with_softmax_it_is_torchs_transformer(norm: str) -> None:
    model = made(norm=norm, phi="softmax", learned_gain=None)
    settings = {"nhead": 3, "dim_feedforward": 7, "dropout": 0.0, "layer_norm_eps": 1e-6, "batch_first": True}
    encoder_layer = nn.TransformerEncoderLayer(12, **settings, norm_first=norm == "pre")
    decoder_layer = nn.TransformerDecoderLayer(12, **settings, norm_first=norm == "pre")
    encoder = nn.TransformerEncoder(encoder_layer, 2, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(decoder_layer, 2)
    for side, theirs in ((model.encoder, encoder), (model.decoder, decoder)):
        for our, their in zip(side, theirs.layers, strict=True):
            norms = [our.attention_norm, *([our.source_norm] if our.source_norm else []), our.memory_norm]
            for i, our_norm in enumerate(norms, 1):
                copy(getattr(their, f"norm{i}"), our_norm.state_dict())
            copy_attention(their.self_attn, our.attention, [our.attention.qkv])
            if our.source_attention is not None:
                copy_attention(
                    their.multihead_attn, our.source_attention, [our.source_attention.q, our.source_attention.kv]
                )
            copy(their.linear1, {"weight": our.memory.keys, "bias": torch.zeros(7)})
            copy(their.linear2, {"weight": our.memory.values.T, "bias": torch.zeros(12)})

    source, target = padded(*SOURCES), padded(*TARGETS)
    embedding, positions = model.embedding.weight, model.sinusoids
    x, y = (embedding[tokens] * math.sqrt(12) + positions[: tokens.shape[1]] for tokens in (source, target))
    states = model.encoder_norm(encoder(x, src_key_padding_mask=source == 0))
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    out = decoder(y, states, tgt_mask=causal, memory_key_padding_mask=source == 0)
    want = model.decoder_norm(out) @ embedding.T
    tokens = target != 0
    torch.testing.assert_close(model(source, target)[tokens], want[tokens], rtol=1e-3, atol=1e-3)


def copy(to: nn.Module, tensors: dict[str, Tensor]) -> None:
    to.load_state_dict({name: tensor.detach() for name, tensor in tensors.items()})


def copy_attention(to: nn.MultiheadAttention, our: nn.Module, projections: list[nn.Linear]) -> None:
    inner = {f"in_proj_{kind}": torch.cat([getattr(x, kind) for x in projections]) for kind in ("weight", "bias")}
    copy(to, {**inner, "out_proj.weight": our.out.weight, "out_proj.bias": our.out.bias})


@pytest.mark.parametrize("kind", ["ReLUFormer", "softmax", "entmax", "rotary"])
def test_a_sentence_does_not_depend_on_its_batch_nor_on_padding(kind: str) -> None:
    model = made(**KINDS[kind])
    together = model(padded(*SOURCES), padded(*TARGETS))
    wider = model(nn.functional.pad(padded(*SOURCES), (0, 5)), nn.functional.pad(padded(*TARGETS), (0, 3)))
    for i, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        alone = model(torch.tensor([source]), torch.tensor([target]))[0]
        torch.testing.assert_close(together[i, : len(target)], alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(wider[i, : len(target)], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["ReLUFormer", "softmax", "rotary", "ReLA"])
def test_logits_do_not_depend_on_what_comes_later_but_on_all_that_came_before(kind: str) -> None:
    model = made(**KINDS[kind])
    source, target = padded(SOURCES[0]), torch.tensor([[1, 6, 3, 10, 5]])
    for place in range(1, 5):
        changed = target.clone()
        changed[0, place] = 11
        before, after = model(source, target)[0], model(source, changed)[0]
        assert torch.equal(before[:place], after[:place])
        assert (before[place:] != after[place:]).any(1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns_from_the_logits_and_the_penalties(kind: str) -> None:
    model = made(**KINDS[kind]).train()
    logits, found = model(padded(*SOURCES), padded(*TARGETS), penalties=True)
    (logits.square().mean() + found.normalisation + found.entropy).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that was made."""

    size = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_training_with_penalties_makes_no_matrix_of_length_times_length() -> None:
    model = ReLUFormer(**{**SMALL, "max_length": 600})
    tokens = torch.randint(3, 13, (2, 600))
    tokens[0, 500:] = 0
    with LargestTensor() as largest:
        logits, found = model(tokens, tokens, penalties=True)
        (logits.mean() + found.normalisation + found.entropy).backward()
    assert 2 * 600 * 3 * 12 <= largest.size < 600 * 600


def test_a_model_starts_with_embedded_tokens_and_logits_of_variance_1() -> None:
    model = ReLUFormer(2000, dim=128, encoder_layers=2, decoder_layers=2).eval()
    assert float(model.embedding.weight.detach().std()) == pytest.approx(128**-0.5, rel=0.01)
    logits = model(torch.randint(3, 2000, (4, 20)), torch.randint(3, 2000, (4, 20)))
    assert float(logits.detach().std()) == pytest.approx(1, rel=0.1)
    assert float(model.decoder[1].source_attention.gain[3].detach()) == pytest.approx(math.sqrt(2))


@torch.no_grad()
def test_rows_of_a_new_model_sum_to_one_where_gamma_fits_their_keys() -> None:
    keys, sums = 256, []
    model = ReLUFormer(2000, dim=128, heads=2, encoder_layers=2, gamma=math.sqrt(keys / math.pi)).eval()
    for layer in model.encoder:
        layer.attention.register_forward_pre_hook(
            lambda module, given: sums.append(module.weights(given[0]).sum(-1).mean())
        )
    model.encode(torch.randint(3, 2000, (4, keys)))
    assert len(sums) == 2
    for total in sums:
        assert 0.6 < float(total) < 1.6  # scores are not quite independent; with γ = 1 it would be 9
    assert float(model.encoder[0].attention.gain[1]) == pytest.approx(math.sqrt(2 * math.pi / keys))


def test_dropout_is_for_training_only() -> None:
    model = made(dropout=0.3)
    source, target = padded(*SOURCES), padded(*TARGETS)
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


@pytest.mark.slow
def test_a_compiled_model_is_the_same() -> None:
    model = made(encoder_layers=1, decoder_layers=1)
    source, target = padded(*SOURCES), padded(*TARGETS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits, found = compiled(source, target, penalties=True)
    want, wanted = model(source, target, penalties=True)
    torch.testing.assert_close(logits, want)
    torch.testing.assert_close(tuple(found), tuple(wanted))


def test_autocast_to_bfloat16_is_right_to_rounding() -> None:
    model = ReLUFormer(**SMALL).eval().requires_grad_(False)
    source, target = padded(*SOURCES), padded(*TARGETS)
    with torch.autocast("cpu", torch.bfloat16):
        out, found = model(source, target, penalties=True)
    want, wanted = model(source, target, penalties=True)
    assert (out - want).abs().max() < 0.05 * want.abs().max()
    assert float(found.normalisation) == pytest.approx(float(wanted.normalisation), rel=0.05)


@pytest.mark.parametrize("changes", [{}, {"encoder_layers": 0, "positions": "rotary"}])
def test_a_loaded_model_is_the_saved_one_to_the_bit(tmp_path: Path, changes: dict[str, object]) -> None:
    saved = made(**changes)
    models.save(saved, tmp_path, {"BLEU": 34.56})
    loaded = models.load(tmp_path)
    assert type(loaded) is ReLUFormer
    assert loaded.config == saved.config
    inputs = [padded(*TARGETS)] if changes else [padded(*SOURCES), padded(*TARGETS)]
    assert torch.equal(loaded(*inputs), saved(*inputs))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nomax-reluformer"
    card = (tmp_path / "README.md").read_text()
    assert f'pipeline_tag: "{"text-generation" if changes else "translation"}"' in card
    assert "| BLEU | 34.56 |" in card
    assert "# ReLUFormer with φ = `1.4142135623730951*relu/L^0.5`" in card


def test_a_config_survives_json_and_makes_the_same_model() -> None:
    config = ReLUFormerConfig(99, phi=" 2 * relu / L^0.50", memory_phi="softmax", joined_norm="rela", norm="post")
    assert config.phi == "2*relu/L^0.5"
    assert ReLUFormerConfig(**json.loads(json.dumps(asdict(config)))) == config
    small = ReLUFormerConfig(**SMALL)
    assert ReLUFormer.from_config(small).config == small
    assert ReLUFormerConfig(99).phi == "1.4142135623730951*relu/L^0.5"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocabulary": 2}, "three different ids below vocabulary=2"),
        ({"end": 1}, "three different ids"),
        ({"vocabulary": "8000"}, "vocabulary='8000' must be an integer"),
        ({"phi": "relu/l"}, "did you mean 'relu/L'"),
        ({"phi": "relu/L, L=keys"}, "counts padding and what comes later"),
        ({"phi": "softmax"}, "phi='softmax' normalises each row itself.*learned_gain=None"),
        ({"phi": "entmax15", "learned_gain": "layer"}, "instead of 'layer'"),
        ({"gamma": 0.0}, "gamma=0.0 must be a number above 0"),
        ({"gamma": math.nan}, "gamma=nan must be a finite number"),
        ({"phi": "softmax", "learned_gain": None, "gamma": 2.0}, "gamma=2.0 must be .* 1 for a φ that normalises"),
        ({"memory_phi": "rellu"}, "did you mean 'relu'"),
        ({"memory_phi": "entmax15"}, "memory_phi='entmax15'"),
        ({"norm": "both"}, "norm='both' must be 'pre' or 'post'"),
        ({"positions": "learned"}, "positions='learned' must be 'sinusoidal' or 'rotary'"),
        ({"joined_norm": "rms"}, "joined_norm='rms' must be 'rela' or None"),
        ({"heads": 5}, "dim=256 must be a multiple of heads=5"),
        ({"heads": 256, "positions": "rotary"}, "with an even quotient"),
        ({"encoder_layers": -1}, "encoder_layers=-1 must be at least 0"),
        ({"decoder_layers": 0}, "decoder_layers=0 must be at least 1"),
        ({"padding": -1}, "padding=-1 must be at least 0"),
        ({"dropout": 2}, "dropout=2 must be a probability"),
        ({"memory_norm": 1}, "memory_norm=1 must be True or False"),
    ],
)
def test_a_slip_in_the_config_is_answered_in_words(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReLUFormerConfig(**{"vocabulary": 8000, **settings})


def test_texts_that_do_not_fit_are_named_with_what_fits() -> None:
    model, language = made(max_length=6), made(encoder_layers=0)
    good, long = torch.ones(1, 6, dtype=torch.int64), torch.ones(1, 7, dtype=torch.int64)
    assert model(good, good).shape == (1, 6, 13)
    with pytest.raises(ValueError, match=r"source has 7 tokens, but the model's max_length is 6\. Split the text"):
        model(long, good)
    with pytest.raises(ValueError, match="target has 7 tokens"):
        model(good, long)
    with torch.no_grad():
        caches, encoded = model.caches(), model.encode(good)
        model.decode(good, encoded, caches)
        with pytest.raises(ValueError, match="target has 7 tokens"):
            model.decode(good[:, :1], encoded, caches)
    with pytest.raises(ValueError, match=r"target must be \[batch, length\] token ids, got torch.float32 \[1, 6\]"):
        model(good, good.float())
    with pytest.raises(ValueError, match="call it with source and target"):
        model(good)
    with pytest.raises(ValueError, match="call it with the text alone"):
        language(good, good)
    with pytest.raises(ValueError, match=r"encoded must be what model.encode returns"):
        model.decode(good)


def test_a_small_model_learns_to_write_texts_backwards() -> None:
    model = ReLUFormer(12, dim=32, heads=2, encoder_layers=1, decoder_layers=1, slots=64, dropout=0.0)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    places, losses = torch.arange(6), []
    for _ in range(120):
        length = torch.randint(1, 6, (64, 1))
        words = torch.randint(3, 12, (64, 6))
        source = torch.where(places < length, words, torch.where(places == length, 2, 0))
        backwards = words.gather(1, (length - 1 - places).clamp(min=0))
        target = torch.where(places < length, backwards, torch.where(places == length, 2, 0))
        logits, found = model(source, nn.functional.pad(target, (1, -1), value=1), penalties=True)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
        optimiser.zero_grad()
        (loss + 0.01 * (found.normalisation + found.entropy)).backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 2
    assert sum(losses[-10:]) / 10 < 0.9
