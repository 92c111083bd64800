"""A ViT prepared for inference on a CPU: the same function in fewer passes over memory, see `ViT.prepared`.

B images, L tokens, each `width` wide.
"""

import copy
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax.nn import Attention
from nomax.nn.layers import SLOW, LayerNorm
from nomax.ops.rowwise import add_layer_norm_, gelu

if TYPE_CHECKING:
    from nomax.models.vit import Block, ViT

Rest = tuple[Tensor, Tensor | None]  # what is to be added to the tokens: the output of a layer, and its bias
AGAIN = "It is for inference only: keep the model that it was prepared from, and prepare that one again."


class Product(nn.Module):
    """A linear layer with constant weights, and without a bias unless its caller leaves that to it.

    In float32 it is PyTorch's product: oneDNN's and MKL's packed weights were no faster. In bfloat16 the weights are
    packed by oneDNN, once, where PyTorch rearranges them in every call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = weight.detach().to(dtype, copy=True)
        self.bias = None if bias is None else bias.detach().to(dtype, copy=True)
        if dtype != torch.float32:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.dtype == torch.float32:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return out


class PreparedBlock(nn.Module):
    """A block whose residual sums, and the biases before them, belong to the norms that follow.

    With `only`, just this token is wanted from it: keys and values are those of all tokens, everything else its own.
    """

    def __init__(self, block: "Block", dtype: torch.dtype, only: int | None) -> None:
        super().__init__()
        self.dtype, self.only = dtype, only
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        self.attention = block.attention if only is None else _with_context(block.attention)
        self.attention.fold_gain()
        self.attention_bias = self.attention.out.bias
        self.attention.out.register_parameter("bias", None)
        _pack(self.attention, dtype)
        mlp = block.mlp
        self.up, self.up_bias = Product(mlp.up.weight, None, dtype), mlp.up.bias.detach()
        self.down, self.down_bias = Product(mlp.down.weight, None, dtype), mlp.down.bias.detach()
        self.approximate: Literal["tanh", "none"] = mlp.approximate

    def forward(self, x: Tensor, rest: Rest | None) -> tuple[Tensor, Rest]:
        """Return the tokens and what is still to be added to them; x is used up."""
        tokens = _normed(x, rest, self.attention_norm, self.dtype)
        if self.only is None:
            out = self.attention(tokens)
        else:
            one = slice(self.only, self.only + 1)
            x, out = x[:, one].contiguous(), self.attention(tokens[:, one], tokens)
        tokens = _normed(x, (out, self.attention_bias), self.mlp_norm, self.dtype)
        return x, (self.down(gelu(self.up(tokens), self.up_bias, self.approximate, spent=True)), self.down_bias)


class PreparedViT(nn.Module):
    """What `ViT.prepared` returns: it takes images and returns logits, and can do nothing else."""

    def __init__(self, model: "ViT", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        _check(model, dtype)
        self.config = config = model.config
        # CPUs without products of bfloat16 would emulate them, several times slower than float32.
        self.dtype = torch.float32 if dtype in SLOW else dtype
        model = copy.deepcopy(model).requires_grad_(False).float().eval()
        weight = model.embedding.weight.flatten(1)
        self.embedding, self.patch = Product(weight, model.embedding.bias, self.dtype), config.patch
        self.class_token, self.posemb = model.class_token, model.posemb
        only = None if config.pool == "gap" else 0 if config.pool == "tok" else int(config.has_class_token)
        last = len(model.blocks) - 1
        self.blocks = nn.ModuleList(
            PreparedBlock(cast("Block", block), self.dtype, only if i == last else None)
            for i, block in enumerate(model.blocks)
        )
        self.norm = model.norm
        self.pre_logits = None if model.pre_logits is None else _product(model.pre_logits, self.dtype)
        self.head = None if model.head is None else _product(model.head, self.dtype)
        super().train(False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, num_classes] in float32, or features if the model has no head."""
        self._check(images)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            x = self._features(images)
            return x if self.head is None else self.head(x).float()

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the head: [B, width], or [B, rep_size]."""
        self._check(images)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self._features(images)

    def _check(self, images: Tensor) -> None:
        config = self.config
        if images.shape[1:] != (config.channels, *config.image) or not images.is_cpu:
            expected = ", ".join(map(str, (config.channels, *config.image)))
            raise ValueError(
                f"images must be [batch, {expected}] on the CPU for this model, got {list(images.shape)} on "
                f"{images.device}."
            )
        if torch.is_grad_enabled() and images.requires_grad:
            raise RuntimeError(f"images.requires_grad is True, but a prepared model has no gradients. {AGAIN}")

    def _features(self, images: Tensor) -> Tensor:
        x = self._embed(images)
        rest: Any = None
        for block in self.blocks:
            x, rest = block(x, rest)
        normed = self.config.norm == "tokens"
        x = _normed(x, rest, self.norm, torch.float32) if normed else x + sum(rest)
        x = x[:, int(self.config.has_class_token) :].mean(1) if self.config.pool == "gap" else x[:, 0]
        x = x if normed else self.norm(x)
        return x if self.pre_logits is None else torch.tanh(self.pre_logits(x).float())

    def _embed(self, images: Tensor) -> Tensor:
        """Return the tokens [B, L, width] with their positions, in float32."""
        patches = images.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch)).permute(0, 2, 4, 1, 3, 5)
        x = self.embedding(patches.flatten(3).flatten(1, 2).to(self.dtype)) + self.posemb
        return x if self.class_token is None else torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)

    def extra_repr(self) -> str:
        return f"{self.config.variant}, phi={self.config.phi}, products in {str(self.dtype)[6:]}"

    def train(self, mode: bool = True) -> "PreparedViT":
        if mode:
            raise RuntimeError(f"a prepared model cannot be trained. {AGAIN}")
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise RuntimeError(f"a prepared model stays on the CPU and in the precision it was prepared for. {AGAIN}")

    def requires_grad_(self, requires_grad: bool = True) -> "PreparedViT":
        if requires_grad:
            raise RuntimeError(f"a prepared model cannot be trained. {AGAIN}")
        return self

    def state_dict(self, *args: Any, **settings: Any) -> NoReturn:
        raise RuntimeError(f"a prepared model has no state to save. {AGAIN}")

    def load_state_dict(self, *args: Any, **settings: Any) -> NoReturn:
        raise RuntimeError(f"a prepared model takes no other weights. {AGAIN}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(f"a prepared model can be neither copied nor pickled. {AGAIN}")


def _check(model: "ViT", dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype={dtype!r} must be torch.float32 or torch.bfloat16.")
    if model.posemb.device.type != "cpu":
        raise ValueError(f"prepared() is for CPUs, but the model is on {model.posemb.device}: call model.cpu() first.")
    if any(isinstance(module, Attention) and module.split is not None for module in model.modules()):
        raise ValueError("prepared() takes no model whose sequences are split (nomax.parallel.parallelize).")


def _normed(x: Tensor, rest: Rest | None, norm: LayerNorm, dtype: torch.dtype) -> Tensor:
    """Add the rest to x, in place, and return the norm of that."""
    return norm(x).to(dtype) if rest is None else add_layer_norm_(x, *rest, norm.weight, norm.bias, norm.eps, dtype)


def _product(layer: nn.Linear, dtype: torch.dtype) -> Product:
    return Product(layer.weight, layer.bias, dtype)


def _pack(module: nn.Module, dtype: torch.dtype) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _product(child, dtype))


def _with_context(attention: Attention) -> Attention:
    """Return the same attention with queries of their own, so that few of them can look at all tokens."""
    other = copy.copy(attention)
    other._modules, dim = dict(attention._modules), attention.dim
    qkv = other._modules.pop("qkv")
    assert isinstance(qkv, nn.Linear)
    other.context_dim = dim
    for name, rows in (("q", slice(0, dim)), ("kv", slice(dim, None))):
        layer = copy.copy(qkv)
        layer._parameters = {
            key: None if x is None else nn.Parameter(x[rows], requires_grad=False) for key, x in qkv._parameters.items()
        }
        setattr(other, name, layer)
    return other
