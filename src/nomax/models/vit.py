"""The vision transformer of big_vision, with any φ: patches → encoder of pre-norm blocks → pooled → head.

B images, C channels, L tokens (patches, and one more with a class token), all of them `width` wide.
"""

import math
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax.models.pretrained import Pretrained
from nomax.models.vit_config import ViTConfig
from nomax.nn import Attention, Linear
from nomax.nn.linear import linear
from nomax.ops.gelu import gelu


class Note:
    """Keeps intermediate results under their names, if anybody asked for them."""

    def __init__(self, wanted: bool) -> None:
        self.found: dict[str, Tensor] | None = {} if wanted else None

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if self.found is not None:
            self.found[name] = x
        return x


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, hidden = config.size.width, config.size.mlp
        self.up, self.down = Linear(width, hidden), Linear(hidden, width)
        self.approximate: Literal["tanh", "none"] = "tanh" if config.gelu == "tanh" else "none"
        self.dropout = nn.Dropout(config.dropout)
        for layer in (self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = gelu(linear(x, self.up.weight), self.up.bias, self.approximate, spent=True)
        out: Tensor = self.down(self.dropout(hidden))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each of the normalised tokens and added to them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, heads = config.size.width, config.size.heads
        self.attention_norm = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(
            width,
            heads,
            phi=config.phi,
            qk_norm=config.qk_norm,
            gate=config.gate,
            learned_gain=config.learned_gain,
            learned_alpha=config.learned_alpha,
        )
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, note: Note, name: str) -> Tensor:
        x = note(f"{name}/+sa", x + self.dropout(note(f"{name}/sa", self.attention(self.attention_norm(x)))))
        return note(f"{name}/+mlp", x + self.dropout(note(f"{name}/mlp", self.mlp(self.mlp_norm(x)))))


class ViT(Pretrained):
    """A vision transformer: ViT("S/16", num_classes=1000, phi="relu/L"), with the fields of ViTConfig as arguments.

    Images are [B, C, height, width] with values from -1 to 1.
    """

    def __init__(self, variant: str = "S/16", **settings: Any) -> None:
        super().__init__()
        self.config = config = ViTConfig(variant, **settings)
        width, depth, _, _ = config.size
        rep_size = width if config.rep_size is True else int(config.rep_size)
        self.embedding = nn.Conv2d(config.channels, width, config.patch, stride=config.patch)
        _lecun_normal(self.embedding)
        if config.posemb == "learn":
            self.posemb = nn.Parameter(torch.randn(1, math.prod(config.grid), width) / math.sqrt(width))
        else:
            self.register_buffer("posemb", sincos2d(*config.grid, width), persistent=False)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width)) if config.has_class_token else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pre_logits = Linear(width, rep_size) if rep_size else None
        if self.pre_logits is not None:
            _lecun_normal(self.pre_logits)
        self.head = Linear(rep_size or width, config.num_classes) if config.num_classes else None
        if self.head is not None:
            _lecun_normal(self.head)
            if config.head_zero:
                nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, float(config.head_bias))

    @classmethod
    def from_config(cls, config: ViTConfig) -> "ViT":
        """The model that a config describes, with new weights."""
        return cls(**asdict(config))

    def forward(self, images: Tensor, intermediates: bool = False) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Logits [B, num_classes] and, if asked for, every intermediate result by big_vision's name for it.

        The names are stem, with_posemb, encoder/block00/sa, +sa, mlp and +mlp of each block, encoder/pre_ln, encoded,
        head_input, pre_logits_2d, pre_logits, logits_2d and logits; those in 2d are what the head makes of each patch.
        """
        note = Note(intermediates)
        x = self._features(images, note)
        if self.head is not None:
            if note.found is not None:
                note("logits_2d", self.head(note.found["pre_logits_2d"]))
            x = note("logits", self.head(x))
        return x if note.found is None else (x, note.found)

    def features(self, images: Tensor) -> Tensor:
        """What the head sees, big_vision's pre_logits: [B, width], or [B, rep_size]."""
        return self._features(images, Note(False))

    def _features(self, images: Tensor, note: Note) -> Tensor:
        config, prefix = self.config, int(self.config.has_class_token)
        if images.shape[1:] != (config.channels, *config.image):
            expected = ", ".join(map(str, (config.channels, *config.image)))
            raise ValueError(
                f"images must be [batch, {expected}] for this model, got {list(images.shape)}. Resize the images, or "
                "the model with model.resized(image_size)."
            )
        x = note("stem", self._embed(images))
        x = note("with_posemb", x.flatten(1, 2) + self.posemb)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x = self.dropout(x)
        for i, block in enumerate(self.blocks):
            x = block(x, note, f"encoder/block{i:02d}")
        note("encoder/pre_ln", x)
        x = note("encoded", self.norm(x) if config.norm == "tokens" else x)
        patches = x[:, prefix:]
        x = patches.mean(1) if config.pool == "gap" else x[:, 0] if config.pool == "tok" else patches[:, 0]
        if note.found is not None:
            patches = patches if config.norm == "tokens" else self.norm(patches)
            note("pre_logits_2d", self._represent(patches.unflatten(1, config.grid)))
        x = note("head_input", x if config.norm == "tokens" else self.norm(x))
        return note("pre_logits", self._represent(x))

    def _represent(self, x: Tensor) -> Tensor:
        """What the head sees of pooled tokens, or of each patch."""
        return x if self.pre_logits is None else torch.tanh(self.pre_logits(x))

    def _embed(self, images: Tensor) -> Tensor:
        """The convolution of the patches [B, rows, columns, width], as one product: so its result lies as tokens do."""
        patch = self.embedding.kernel_size[0]
        patches = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch)).permute(0, 2, 4, 1, 3, 5)
        return linear(patches.flatten(3), self.embedding.weight.flatten(1), self.embedding.bias)

    def resized(self, image_size: int | tuple[int, int]) -> "ViT":
        """The same model for images of another size: learned positions are resampled (bicubic) on their grid."""
        model = ViT.from_config(replace(self.config, image_size=image_size)).to(self.posemb)
        weights = self.state_dict()
        if self.config.posemb == "learn":
            grid = self.posemb.detach().unflatten(1, self.config.grid).permute(0, 3, 1, 2).float()
            grid = F.interpolate(grid, model.config.grid, mode="bicubic", antialias=True)
            weights["posemb"] = grid.flatten(2).transpose(1, 2)
        model.load_state_dict(weights)
        return model.train(self.training)

    def macs(self) -> int:
        """Multiply-adds of the encoder per image: projections, MLPs and the two products of attention."""
        (width, depth, mlp, _), tokens = self.config.size, self.config.tokens
        projections = (4 if self.config.gate is None else 5) * width * width
        return depth * tokens * (projections + 2 * width * mlp + 2 * width * tokens)


def _lecun_normal(layer: nn.Conv2d | nn.Linear) -> None:
    """The initialisation of flax: a normal cut off at two standard deviations, with variance 1 / fan-in; zero bias."""
    std = math.sqrt(1 / layer.weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def sincos2d(height: int, width: int, channels: int, temperature: float = 10_000.0) -> Tensor:
    """Fixed positions [1, height · width, channels]: sines and cosines of x and of y at channels/4 wavelengths."""
    quarter = channels // 4
    omega = temperature ** -(torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    y, x = (position.flatten()[:, None] * omega for position in (y, x))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()[None]
