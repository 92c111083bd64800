"""Models whose sequences are split, compared on every rank with the same model in one process."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import zoo
from precision import assert_precise
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nomax
from nomax.conversion import inputs
from nomax.models import ReLUFormer, ViT
from nomax.parallel import Layout, parallelize, split, total

EQUAL = 1e-12  # in float64, where roundings of all layers and of a row that sums to almost nothing stay below


def vit(**settings):
    torch.manual_seed(0)
    settings = {"num_classes": 5, "image_size": 24, "head_zero": False, "phi": "relu/L", **settings}
    return ViT("mu/8", **settings).double()


def reluformer(**settings):
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "slots": 8, "dropout": 0.0}
    return ReLUFormer(20, **{**sizes, **settings}).double()


def texts(length, batch=2, seed=5):
    tokens = torch.randint(3, 20, (batch, length), generator=torch.Generator().manual_seed(seed))
    tokens[1, length - 3 :] = 0  # padding
    return tokens


def images(batch=2):
    return torch.randn(batch, 3, 24, 24, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=EQUAL * max(float(expected.abs().max()), 1.0))


def mean_gradients_close(model, alone, mesh):
    """Compare gradients averaged over the ranks, as data parallelism averages them."""
    for (name, x), y in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        expected = torch.zeros_like(y) if y.grad is None else y.grad
        try:
            close(total(grad, mesh) / mesh.size(), expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def one_vit(mesh, schedule, **settings):
    alone = vit(**settings)
    model = parallelize(copy.deepcopy(alone), mesh, schedule=schedule)
    for batch in (images(), images(3)):
        model.zero_grad()
        alone.zero_grad()
        (logits, penalties), (expected, alones) = model(batch, penalties=True), alone(batch, penalties=True)
        close(torch.stack([logits.sum(), *penalties]), torch.stack([expected.sum(), *alones]))
        close(logits, expected)
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        ((logits * weight).sum() + sum(penalties)).backward()
        ((expected * weight).sum() + sum(alones)).backward()
        mean_gradients_close(model, alone, mesh)
    close(copy.deepcopy(model)(images()), alone(images()))  # as a moving average of the weights is made


def in_half_precision(mesh):
    """Under autocast, the error is at most twice that of one process."""
    alone = vit(qk_norm=True).float()
    model = parallelize(copy.deepcopy(alone), mesh)
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = model(images().float()), alone(images().float())
    assert_precise(logits, expected, alone.double()(images()))


def one_reluformer(mesh, schedule, **settings):
    alone = reluformer(**settings)
    model = parallelize(copy.deepcopy(alone), mesh, schedule=schedule)
    for source, target in [(texts(13), texts(9)), (texts(7), texts(18))]:
        inputs = (source, target) if alone.config.encoder_layers else (target,)
        model.zero_grad()
        alone.zero_grad()
        results = []
        for each in (model, alone):
            logits, penalties = each(*inputs, penalties=True, memory_penalty=True)
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten()) + sum(penalties)
            loss.backward()
            results.append((logits, *penalties))
        for x, y in zip(*results, strict=True):
            close(x, y)
        mean_gradients_close(model, alone, mesh)


class InnerAttention(torch.nn.Module):
    """What stands between projections, as in converted models."""

    split = None

    def forward(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
        operation = nomax.attention if self.split is None else self.split.attention
        return operation(query, key, value, attn_mask, dropout_p, is_causal, scale, phi="relu/L")


class ForeignLayer(torch.nn.Module):
    """A layer in the manner of transformers: named inputs, a mask of all queries, and a tuple."""

    def __init__(self):
        super().__init__()
        self.qkv, self.inner_attention = torch.nn.Linear(8, 24), InnerAttention()

    def forward(self, hidden_states, attention_mask):
        query, key, value = self.qkv(hidden_states).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        heads = self.inner_attention(query, key, value, attention_mask, 0.0, False, 0.5)
        return hidden_states + heads.transpose(1, 2).flatten(2), None


def foreign(mesh, placement):
    """Layers that are not ours."""
    torch.manual_seed(0)
    alone = torch.nn.ModuleList(ForeignLayer() for _ in range(2)).double()
    model = copy.deepcopy(alone)
    parallelize(model, mesh, layers=list(model), placement=placement)
    x, mask = torch.randn(2, 11, 8, dtype=torch.float64), torch.ones(11, 11, dtype=torch.bool).tril()
    results = []
    for layers in (model, alone):
        y = x
        for layer in layers:
            y, _ = layer(hidden_states=y, attention_mask=mask)
        y.square().sum().backward()
        results.append(y)
    close(*results)
    mean_gradients_close(model, alone, mesh)


ZOO = {entry.name: entry for entry in zoo.TRANSFORMERS + zoo.TIMM}
CONVERTED = {
    "BertModel": {},
    "ModernBertModel": {},  # rotary positions, and layers with a window
    "ViTModel": {"qk_norm": True},
    "GPT2LMHeadModel": {"placement": "zigzag"},
    "LlamaForCausalLM": {"placement": "zigzag"},  # rotary positions, grouped heads
    "MistralForCausalLM": {},  # a sliding window
    "vit_tiny_patch16_224": {"schedule": "reduce"},
    "vit_base_patch16_siglip_224": {},  # attention in its pooling head, which is not split
    "beit_base_patch16_224": {},  # a bias of relative positions
}
NOT_SPLIT = {
    "T5ForConditionalGeneration": "several stacks of layers",
    "CLIPModel": "several stacks of layers",
    "swin_tiny_patch4_window7_224": "several stacks of layers",
    "DINOv3ViTModel": "is told position_embeddings",
    "vit_small_patch16_rope_224": "is told rope",
    "vit_srelpos_small_patch16_224": "is told shared_rel_pos",
    "samvit_base_patch16": r"a sequence to split is \[batch, positions, dim\]",
}


def results(model, named, arguments=()):
    """Outputs, and gradients of the parameters, by a loss to which all outputs contribute."""
    out = zoo.first_output(lambda **named: model(*arguments, **named), named)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    (out * weight).sum().backward()
    return out


def converted(mesh, name, qk_norm=None, **settings):
    """A model of somebody else, with φ, in float64."""
    alone = ZOO[name].model().double()
    nomax.convert(alone, phi="relu/L", qk_norm=qk_norm)
    arguments, named = inputs.made_up(alone)
    if "input_ids" in named:  # some of it padding
        named["attention_mask"] = torch.ones_like(named["input_ids"])
        named["attention_mask"][1, -2:] = 0
    model = parallelize(copy.deepcopy(alone), mesh, **settings)
    close(results(model, named, arguments), results(alone, named, arguments))
    mean_gradients_close(model, alone, mesh)
    if "input_ids" in named:
        del named["attention_mask"]  # then causal models need no mask at all
        close(results(model, named), results(alone, named))


def converted_torch(mesh):
    """PyTorch's own encoder, with a causal mask for all queries."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    alone = zoo.stirred(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x, mask = torch.randn(2, 9, 16, dtype=torch.float64), torch.nn.Transformer.generate_square_subsequent_mask(9)
    nomax.convert(alone, phi="relu/L", inputs=x)
    model = parallelize(copy.deepcopy(alone), mesh, placement="zigzag")
    for settings in ({}, {"mask": mask.double(), "is_causal": True}):
        outs = [each(x, **settings) for each in (model, alone)]
        close(*outs)


def not_split(mesh, name):
    """What cannot be split exactly is refused by name, before anything is sent."""
    model = ZOO[name].model()
    nomax.convert(model, phi="relu/L")
    arguments, named = inputs.made_up(model)
    with pytest.raises(ValueError, match=NOT_SPLIT[name]), torch.no_grad():
        parallelize(model, mesh)(*arguments, **named)


def not_split_in_part(mesh):
    """Converted layers beside softmax, caches, packed sequences and weights."""
    model = ZOO["BertModel"].model()
    nomax.convert(model, phi="relu/L", layers="encoder.layer.1.*")
    with pytest.raises(ValueError, match=r"split in encoder.layer.0, a BertLayer: .* was not converted"):
        parallelize(model, mesh)
    torch_layer = torch.nn.TransformerEncoderLayer(8, 2, 8)
    model = torch.nn.TransformerEncoder(torch_layer, 1, enable_nested_tensor=False)
    nomax.convert(model, phi="relu/L", inputs=torch.randn(3, 2, 8))
    with pytest.raises(ValueError, match="batch_first=False"):
        parallelize(model, mesh)
    model = ZOO["LlamaForCausalLM"].model()
    nomax.convert(model, phi="relu/L")
    words = zoo.words(2, 6)
    with torch.no_grad():
        cache = model(words, use_cache=True).past_key_values
        parallelize(model, mesh)
        with pytest.raises(ValueError, match="takes no key-value cache"):
            model(words[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="output_attentions"):
            model(words, output_attentions=True, use_cache=False)


def own_logits(mesh):
    """A language model whose logits stay split, with losses added up over the ranks."""
    alone, text = reluformer(encoder_layers=0, positions="rotary"), texts(17)
    model = parallelize(copy.deepcopy(alone), mesh, gather_output=False)
    layout = Layout.zigzag(17, mesh.size())
    logits = model(text)
    labels = split(text, mesh, 1, layout)
    assert logits.shape[:2] == labels.shape
    own = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum")
    loss = total(own, mesh) / total((labels != 0).sum(), mesh)
    expected = F.cross_entropy(alone(text).flatten(0, 1), text.flatten(), ignore_index=0)
    close(loss, expected)
    loss.backward()
    expected.backward()
    mean_gradients_close(model, alone, mesh)


def with_data_parallelism(mesh, kind):
    """Two halves of a batch, each split over half of the ranks: one mesh of data × sequence."""
    ranks = mesh.size()
    whole = init_device_mesh("cpu", (2, ranks // 2) if ranks > 1 else (1, 1), mesh_dim_names=("data", "sequence"))
    alone, batch, labels = vit(pool="tok"), images(4), torch.tensor([0, 1, 2, 3])
    F.cross_entropy(alone(batch), labels).backward()
    model = parallelize(copy.deepcopy(alone), whole["sequence"])
    own = slice(2 * whole.get_local_rank("data"), 2 * whole.get_local_rank("data") + 2) if ranks > 1 else slice(None)
    if kind == "ddp":
        model = DistributedDataParallel(model)
        trained = model.module
    else:
        for block in model.blocks:
            fully_shard(block, mesh=whole)
        trained = fully_shard(model, mesh=whole)
    F.cross_entropy(model(batch[own]), labels[own]).backward()
    for (name, x), y in zip(trained.named_parameters(), alone.parameters(), strict=True):
        grad = x.grad.full_tensor() if kind == "fsdp" else x.grad
        expected = torch.zeros_like(y) if y.grad is None else y.grad
        try:
            close(grad, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def refused(mesh):
    model = parallelize(vit(), mesh)
    with pytest.raises(ValueError, match="already"):
        parallelize(model, mesh)
    with pytest.raises(ValueError, match=r"knows ViT, ReLUFormer and models that nomax\.convert"):
        parallelize(torch.nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="nothing to pool"):
        parallelize(vit(), mesh, gather_output=False)
    with pytest.raises(ValueError, match="no attention that can be split"):
        parallelize(torch.nn.Linear(2, 2), mesh, layers=[torch.nn.Linear(2, 2)])
    text = parallelize(reluformer(encoder_layers=0), mesh)
    with pytest.raises(ValueError, match="takes no cache"), torch.no_grad():
        text.decode(texts(4), caches=text.caches())


def cases(mesh) -> dict[str, Callable[[], None]]:
    """Return every case by name."""
    vits = {
        "mean of patches": {},
        "class token": {"pool": "tok"},
        "class token that is not pooled": {"class_token": True, "posemb": "sincos2d", "norm": "pooled"},
        "first patch, gate, learned gain and α": {
            "pool": "0", "gate": "silu", "learned_gain": "head", "learned_alpha": "head", "qk_norm": True
        },
    }  # fmt: skip
    text = {
        "translation": {},
        "language model, rotary": {"encoder_layers": 0, "positions": "rotary"},
        "post-norm": {"norm": "post", "learned_gain": None},
    }
    everything: dict[str, Callable[[], None]] = {}
    for schedule in ("ring", "reduce"):
        everything |= {f"ViT, {name} ({schedule})": partial(one_vit, mesh, schedule, **s) for name, s in vits.items()}
        everything |= {f"{name} ({schedule})": partial(one_reluformer, mesh, schedule, **s) for name, s in text.items()}
    everything["autocast"] = partial(in_half_precision, mesh)
    everything["foreign layers"] = partial(foreign, mesh, "contiguous")
    everything["foreign layers, zigzag"] = partial(foreign, mesh, "zigzag")
    for name, settings in CONVERTED.items():
        everything[f"converted {name}"] = partial(converted, mesh, name, **settings)
    everything["converted encoder of torch"] = partial(converted_torch, mesh)
    for name in NOT_SPLIT:
        everything[f"not split: {name}"] = partial(not_split, mesh, name)
    everything["not split in part"] = partial(not_split_in_part, mesh)
    everything["own logits"] = partial(own_logits, mesh)
    everything["data × sequence, DDP"] = partial(with_data_parallelism, mesh, "ddp")
    everything["data × sequence, FSDP2"] = partial(with_data_parallelism, mesh, "fsdp")
    everything["refused"] = partial(refused, mesh)
    return everything
