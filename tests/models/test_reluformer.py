"""ReLUFormer against its formulas in float64, against torch's own transformer, and against itself in other batches."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from precision import assert_rounded, five_errors
from reluformer_formulas import KINDS, SMALL, SOURCES, TARGETS, Formulas, made, padded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nomax import models
from nomax.models import ReLUFormer, ReLUFormerConfig

# Two computations in float64 differ by about 1e-13 after these four layers; a wrong formula is off by far more.
FAR_FROM_A_MISTAKE = {"rtol": 1e-9, "atol": 1e-9}
ROUNDINGS = 64  # of float32 in a logit, relative to the largest: what these four layers add up, with room for bad luck
ASKED = {"penalties": True, "memory_penalty": True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_padded_batch_gives_what_the_formulas_give_for_each_sentence(kind: str, dtype: torch.dtype) -> None:
    model = made(**KINDS[kind]).to(dtype)
    logits = model(padded(*SOURCES), padded(*TARGETS))
    for i, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        want = torch.from_numpy(Formulas(model).logits(source, target))
        if dtype == torch.float64:
            torch.testing.assert_close(logits[i, : len(target)], want, **FAR_FROM_A_MISTAKE)
        else:
            alone = model(torch.tensor([source]), torch.tensor([target]))[0]
            assert_rounded(alone, want, ROUNDINGS)
            assert_rounded(logits[i, : len(target)], want, ROUNDINGS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_language_model_is_the_decoder_alone(kind: str) -> None:
    model = made(encoder_layers=0, **KINDS[kind]).double()
    assert not any("source" in name or "encoder" in name for name, _ in model.named_parameters())
    logits = model(padded(*TARGETS))
    for i, target in enumerate(TARGETS):
        want = torch.from_numpy(Formulas(model).logits(None, target))
        torch.testing.assert_close(logits[i, : len(target)], want, **FAR_FROM_A_MISTAKE)


def test_penalties_are_means_over_tokens_and_heads_and_then_over_attentions() -> None:
    model = made().double().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("qkv.bias", "q.bias", "kv.bias")):
                parameter[: 2 * 12] = 1.5  # queries and keys that agree, so that no row of weights is empty
    logits, losses = model(padded(*SOURCES), padded(*TARGETS), penalties=True, memory_penalty=True)
    torch.testing.assert_close(logits, model(padded(*SOURCES), padded(*TARGETS)))
    formulas = Formulas(model)
    for source, target in zip(SOURCES, TARGETS, strict=True):
        formulas.logits(source, target)
    assert (len(formulas.penalties), len(formulas.sizes)) == (2 + 2 + 2, 2 + 2)
    want = torch.tensor(formulas.mean_penalties(), dtype=torch.float64)
    torch.testing.assert_close(torch.stack(tuple(losses)), want, **FAR_FROM_A_MISTAKE)
    assert min(losses) > 0
    rows, memories = (model(padded(*SOURCES), padded(*TARGETS), **{name: True})[1] for name in ASKED)
    torch.testing.assert_close((*rows[:3], memories.memory_l1), tuple(losses))
    assert [float(x) for x in (rows.memory_l1, *memories[:3])] == [0, 0, 0, 0]


def test_padding_is_in_no_penalty_of_a_language_model() -> None:
    model = made(encoder_layers=0).double()
    losses = model(padded(*TARGETS), **ASKED)[1]
    wider = model(nn.functional.pad(padded(*TARGETS), (0, 4)), **ASKED)[1]
    torch.testing.assert_close(tuple(wider), tuple(losses))
    each = model(padded(*TARGETS), **dict.fromkeys(ASKED, "sequences"))[1]
    alone = [model(padded(target), **ASKED)[1] for target in TARGETS]
    for name in losses._fields:
        torch.testing.assert_close(getattr(each, name), torch.stack([getattr(one, name) for one in alone]))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_with_softmax_it_is_torchs_transformer(norm: str) -> None:
    model = made(norm=norm, phi="softmax", learned_gain=None).double()
    settings = {
        "dtype": torch.float64,
        "nhead": 3,
        "dim_feedforward": 7,
        "dropout": 0.0,
        "layer_norm_eps": 1e-6,
        "batch_first": True,
    }
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
    torch.testing.assert_close(model(source, target)[tokens], want[tokens], **FAR_FROM_A_MISTAKE)


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
        assert_rounded(together[i, : len(target)], alone, ROUNDINGS)
        assert_rounded(wider[i, : len(target)], alone, ROUNDINGS)


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
    logits, losses = model(padded(*SOURCES), padded(*TARGETS), penalties=True)
    (logits.square().mean() + losses.normalisation + losses.entropy).backward()
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
        logits, losses = model(tokens, tokens, penalties=True)
        (logits.mean() + losses.normalisation + losses.entropy).backward()
    assert 2 * 600 * 3 * 12 <= largest.size < 600 * 600


def test_a_model_starts_with_embedded_tokens_and_logits_of_variance_1() -> None:
    model = ReLUFormer(2000, dim=128, encoder_layers=2, decoder_layers=2).eval()
    assert float(model.embedding.weight.detach().std()) == pytest.approx(128**-0.5, rel=five_errors(2000 * 128))
    logits = model(torch.randint(3, 2000, (4, 20)), torch.randint(3, 2000, (4, 20)))
    # The 80 positions of 2,000 logits are not independent: of so many states the deviation is known to a tenth.
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
    logits, losses = compiled(source, target, **ASKED)
    want, wanted = model(source, target, **ASKED)
    torch.testing.assert_close(logits, want)
    torch.testing.assert_close(tuple(losses), tuple(wanted))


def test_autocast_to_bfloat16_is_right_to_rounding() -> None:
    model = ReLUFormer(**SMALL).eval().requires_grad_(False)
    source, target = padded(*SOURCES), padded(*TARGETS)
    with torch.autocast("cpu", torch.bfloat16):
        out, losses = model(source, target, penalties=True)
    want, wanted = model(source, target, penalties=True)
    # A number has 8 bits, so that a rounding is 2^-9; those of four layers add up to less than 25 of them.
    assert (out - want).abs().max() < 25 * 2**-9 * want.abs().max()
    assert float(losses.normalisation) == pytest.approx(float(wanted.normalisation), rel=25 * 2**-9)


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
        ({"phi": "relu/L, L=keys"}, "counts padding and later tokens"),
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
        logits, terms = model(source, nn.functional.pad(target, (1, -1), value=1), penalties=True)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
        optimiser.zero_grad()
        (loss + 0.01 * (terms.normalisation + terms.entropy)).backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > 2
    assert sum(losses[-10:]) / 10 < 0.9
