"""The vision transformer of big_vision, with any φ: patches → encoder of pre-norm blocks → pool → head.

First the config and big_vision's named sizes, then the model. B images, C channels, L tokens (the patches, and the
class token if there is one), each `width` wide.
"""

import math
import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nomax._files import check_fields, did_you_mean
from nomax.models.hub import Pretrained
from nomax.models.prepared import PreparedViT
from nomax.nn import Attention, Linear, Penalties
from nomax.nn.attention import Gate, Learned
from nomax.nn.layers import Dropout, LayerNorm, linear
from nomax.nn.relu_losses import Found, Tally, View
from nomax.ops.rowwise import gelu
from nomax.phi import Phi


class Size(NamedTuple):
    width: int
    depth: int
    mlp: int
    heads: int


SIZES = {
    "mu": Size(32, 1, 128, 2),
    # These three are ours, for small images on a CPU; the others are big_vision's.
    "pico": Size(64, 4, 256, 2),
    "nano": Size(96, 6, 384, 3),
    "micro": Size(128, 6, 512, 4),
    "Ti": Size(192, 12, 768, 3),
    "S": Size(384, 12, 1536, 6),
    "M": Size(512, 12, 2048, 8),
    "B": Size(768, 12, 3072, 12),
    "L": Size(1024, 24, 4096, 16),
    "So400m": Size(1152, 27, 4304, 16),
    "H": Size(1280, 32, 5120, 16),
    "g": Size(1408, 40, 6144, 16),
    "G": Size(1664, 48, 8192, 16),
    "e": Size(1792, 56, 15360, 16),
}

Position = Literal["learn", "sincos2d"]
Pool = Literal["gap", "tok", "0"]
Norm = Literal["tokens", "pooled"]
Gelu = Literal["tanh", "exact"]
Crop = Literal["small", "square", "resize", "none"]
Probabilities = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class Preprocessing:
    """Describe how to prepare an image for evaluation, besides the model's size and channels.

    `crop` and `antialias` are those of nomax.data.images.transforms.Evaluation.
    """

    crop: Crop = "small"
    antialias: bool = True
    range: tuple[float, float] = (-1.0, 1.0)  # of the values, from black to white

    def __post_init__(self) -> None:
        if isinstance(self.range, list | tuple):
            object.__setattr__(self, "range", tuple(self.range))
        check_fields(self)
        if self.range != (-1, 1):
            raise ValueError(f"range={self.range!r}: nomax prepares images with values from -1 to 1 only.")

    def spelled(self, height: int, width: int, channels: int) -> str:
        """Describe all of it in words."""
        size, larger = f"{height}×{width} pixels", f"{round(min(height, width) * 256 / 224)} pixels"
        steps = {
            "small": f"the shorter side resized to {larger}, the aspect kept; the central {size}",
            "square": f"both sides resized to {larger}; the central {size}",
            "resize": f"the whole image resized to {size}, its aspect not kept",
            "none": f"images of {size} as they are",
        }
        exact = "" if self.antialias or self.crop in ("small", "none") else " (bilinear without antialiasing)"
        colours = {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")
        return (
            f"{steps[self.crop]}{exact}; {colours}, values from {self.range[0]:g} (black) to {self.range[1]:g} (white)"
        )


@dataclass(frozen=True)
class ViTConfig:
    """The config of a ViT. `dataclasses.asdict` of it is plain JSON."""

    variant: str = "S/16"  # size / patch
    num_classes: int = 1000  # 0: no head, the model returns its features
    image_size: int | tuple[int, int] = 224  # or (height, width); multiples of the patch
    channels: int = 3
    phi: str = "relu/L"
    qk_norm: bool = False
    gate: Gate | None = None
    posemb: Position = "learn"
    pool: Pool = "gap"  # the mean of the patches, the class token, or ("0") the first patch
    rep_size: bool | int = False  # a layer with tanh before the head: as wide as the model (True), or this wide
    head_bias: float = 0.0  # initial value of the head's biases: -10 for sigmoid losses over 21,843 classes
    head_zero: bool = True
    gelu: Gelu = "tanh"  # JAX's default; PyTorch's is "exact"
    learned_gain: Learned | None = None
    learned_alpha: Learned | None = None
    learned_shift: Learned | None = None
    dropout: float = 0.0  # of the embedded patches and the output of each attention and MLP
    class_token: bool | None = None  # None: only if pool="tok" needs it
    norm: Norm = "tokens"  # apply the last LayerNorm to the tokens, or (timm's fc_norm) after pooling
    # For users of the model; None if unknown.
    classes: tuple[str, ...] | None = field(default=None, repr=False)  # the names of the head's outputs, in order
    probabilities: Probabilities | None = None  # the function from logits to probabilities, as in the training loss
    preprocessing: Preprocessing | None = None

    def __post_init__(self) -> None:
        normal: dict[str, Any] = {"phi": str(Phi.parse(self.phi))}
        if isinstance(self.classes, list | tuple):
            normal["classes"] = tuple(self.classes)
        if isinstance(self.preprocessing, dict):
            normal["preprocessing"] = _preprocessing(self.preprocessing)
        if isinstance(self.image_size, list | tuple):  # a pair is a list in JSON; a square becomes one number
            pair = tuple(self.image_size)
            normal["image_size"] = pair[0] if len(pair) == 2 and pair[0] == pair[1] else pair
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        check_fields(self)
        for name, least in (("num_classes", 0), ("channels", 1), ("rep_size", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least {least}.")
        if self.classes is not None and len(self.classes) != self.num_classes:
            raise ValueError(
                f"classes has {len(self.classes):,} names for num_classes={self.num_classes:,}: give each class one "
                "name, or classes=None."
            )
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout={self.dropout!r} must be a probability, from 0 to 1.")
        if self.pool == "tok" and self.class_token is False:
            raise ValueError('pool="tok" pools the class token, so class_token=False is not allowed.')
        if any(side < self.patch or side % self.patch for side in self.image):
            raise ValueError(
                f"image_size={self.image_size!r} must be a multiple of the patch, {self.patch} in {self.variant!r}: "
                "pixels at the edge would be cut off. Resize the images, or choose another patch."
            )

    @property
    def size(self) -> Size:
        """Width, depth, width of the MLP, and number of heads."""
        return parse_variant(self.variant)[0]

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return parse_variant(self.variant)[1]

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the images."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of an image in patches."""
        return self.image[0] // self.patch, self.image[1] // self.patch

    @property
    def has_class_token(self) -> bool:
        """True if there is a token besides the patches."""
        return self.pool == "tok" if self.class_token is None else self.class_token

    @property
    def tokens(self) -> int:
        """L, the length of the sequence."""
        return math.prod(self.grid) + self.has_class_token

    @property
    def matrix_numbers(self) -> int:
        """Number of weights, without biases, norms and other small parameters."""
        width, depth, mlp, _ = self.size
        rep_size = width if self.rep_size is True else int(self.rep_size)
        blocks = depth * ((4 if self.gate is None else 5) * width * width + 2 * width * mlp)
        head = width * rep_size + (rep_size or width) * self.num_classes
        learned = self._positions if self.posemb == "learn" else 0
        return self.channels * self.patch**2 * width + learned + blocks + head

    @property
    def fixed_numbers(self) -> int:
        """Number of values in the model that are not weights."""
        return self._positions if self.posemb == "sincos2d" else 0

    @property
    def _positions(self) -> int:
        return math.prod(self.grid) * self.size.width


def _preprocessing(given: dict[str, Any]) -> Preprocessing:
    known = [field.name for field in fields(Preprocessing)]
    if unknown := [key for key in given if key not in known]:
        raise ValueError(f"preprocessing has unknown keys: {', '.join(unknown)}; known are {', '.join(known)}.")
    return Preprocessing(**given)


def parse_variant(variant: str) -> tuple[Size, int]:
    """Split "S/16" into the size S and the patch 16."""
    parts = re.fullmatch(r"(\w+)/([1-9]\d*)", variant) if isinstance(variant, str) else None
    if parts and parts[1] in SIZES:
        return SIZES[parts[1]], int(parts[2])
    patch = (re.findall(r"\d+", str(variant)) or ["16"])[-1]
    hint = did_you_mean(variant, [repr(f"{size}/{patch}") for size in reversed(SIZES)], cutoff=0.35)
    raise ValueError(
        f"variant={variant!r} is unknown{hint} Write size/patch, such as 'S/16', with one of the sizes "
        f"{', '.join(SIZES)} (capitals matter)."
    )


class Recorder:
    """Keep intermediate results by name, if wanted."""

    def __init__(self, wanted: bool) -> None:
        self.results: dict[str, Tensor] | None = {} if wanted else None

    def __call__(self, name: str, x: Tensor, block: str = "") -> Tensor:
        if self.results is not None:
            self.results[block + name] = x  # joined only here: compiled blocks would otherwise depend on their names
        return x


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, hidden = config.size.width, config.size.mlp
        self.up, self.down = Linear(width, hidden), Linear(hidden, width)
        self.approximate: Literal["tanh", "none"] = "tanh" if config.gelu == "tanh" else "none"
        self.dropout = Dropout(config.dropout)
        for layer in (self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = gelu(linear(x, self.up.weight), self.up.bias, self.approximate, spent=True)
        out: Tensor = self.down(self.dropout(hidden))
        return out


class Block(nn.Module):
    """Attention, then the MLP: each takes the normalised tokens, and its output is added to the tokens."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        width, heads = config.size.width, config.size.heads
        self.attention_norm = LayerNorm(width)
        self.attention = Attention(
            width,
            heads,
            phi=config.phi,
            qk_norm=config.qk_norm,
            gate=config.gate,
            learned_gain=config.learned_gain,
            learned_alpha=config.learned_alpha,
            learned_shift=config.learned_shift,
        )
        self.mlp_norm = LayerNorm(width)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, note: Recorder, name: str, tally: Tally, view: View) -> Tensor | tuple[Tensor, Found]:
        """Return the new tokens, and the penalties of their attention, if the tally wants any."""
        tally = tally.empty()
        attended = tally(self.attention, self.attention_norm(x), view)
        x = note("/+sa", self.dropout(note("/sa", attended, name), onto=x), name)
        x = note("/+mlp", self.dropout(note("/mlp", self.mlp(self.mlp_norm(x)), name), onto=x), name)
        return (x, tally.found) if tally.wanted else x


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
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(depth))
        self.norm = LayerNorm(width)
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
        """Return a model with this config and new weights."""
        return cls(**asdict(config))

    def forward(
        self, images: Tensor, intermediates: bool = False, *, penalties: bool | Literal["sequences"] = False
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]] | tuple[Tensor, Penalties]:
        """Return logits [B, num_classes] and, with intermediates=True, every intermediate result by big_vision's name.

        penalties: return logits and `nomax.nn.penalties`, averaged over tokens, heads and layers; with "sequences" for
            each image, [B], independent of the others in the batch.

        The names are stem, with_posemb, encoder/block00/sa, +sa, mlp and +mlp of each block, encoder/pre_ln, encoded,
        head_input, pre_logits_2d, pre_logits, logits_2d and logits; the 2d ones apply the head to each patch.
        """
        if intermediates and penalties:
            raise ValueError("intermediates and penalties cannot both be returned: call the model twice.")
        note, tally = Recorder(intermediates), Tally(penalties)
        x = self._features(images, note, tally)
        if self.head is not None:
            if note.results is not None:
                note("logits_2d", self.head(note.results["pre_logits_2d"]))
            x = note("logits", self.head(x))
        if penalties:
            return x, tally.mean()
        return x if note.results is None else (x, note.results)

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the head, big_vision's pre_logits: [B, width], or [B, rep_size]."""
        return self._features(images, Recorder(False), Tally(False))

    def _features(self, images: Tensor, note: Recorder, tally: Tally) -> Tensor:
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
        view = View(visible=torch.tensor(x.shape[1], device=x.device)) if tally.wanted else View()
        for i, block in enumerate(self.blocks):
            output = block(x, note, f"encoder/block{i:02d}", tally, view)
            x = tally.add(output) if tally.wanted else output
        note("encoder/pre_ln", x)
        x = note("encoded", self.norm(x) if config.norm == "tokens" else x)
        patches = x[:, prefix:]
        x = patches.mean(1) if config.pool == "gap" else x[:, 0] if config.pool == "tok" else patches[:, 0]
        if note.results is not None:
            patches = patches if config.norm == "tokens" else self.norm(patches)
            note("pre_logits_2d", self._represent(patches.unflatten(1, config.grid)))
        x = note("head_input", x if config.norm == "tokens" else self.norm(x))
        return note("pre_logits", self._represent(x))

    def _represent(self, x: Tensor) -> Tensor:
        """Return the input of the head for pooled tokens, or for each patch."""
        return x if self.pre_logits is None else torch.tanh(self.pre_logits(x))

    def _embed(self, images: Tensor) -> Tensor:
        """Embed the patches [B, rows, columns, width] in one product, so that the result has the layout of tokens."""
        patch = self.embedding.kernel_size[0]
        patches = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch)).permute(0, 2, 4, 1, 3, 5)
        return linear(patches.flatten(3), self.embedding.weight.flatten(1), self.embedding.bias)

    def resized(self, image_size: int | tuple[int, int]) -> "ViT":
        """Return the model for images of another size, with learned positions resampled (bicubic) on their grid."""
        model = ViT.from_config(replace(self.config, image_size=image_size)).to(self.posemb)
        weights = self.state_dict()
        if self.config.posemb == "learn":
            grid = self.posemb.detach().unflatten(1, self.config.grid).permute(0, 3, 1, 2).float()
            grid = F.interpolate(grid, model.config.grid, mode="bicubic", antialias=True)
            weights["posemb"] = grid.flatten(2).transpose(1, 2)
        model.load_state_dict(weights)
        return model.train(self.training)

    def prepared(self, dtype: torch.dtype = torch.float32) -> PreparedViT:
        """Return the model for inference on this CPU: images → logits as from model.eval(), in less time.

        dtype: of the products. torch.bfloat16 computes like autocast, with weights kept in bfloat16; a CPU that cannot
        multiply it goes on in float32. Images and logits are float32 either way.

        The result has a copy of the weights: what happens to this model later does not reach it. It cannot be trained,
        saved, copied or moved.
        """
        return PreparedViT(self, dtype)

    def macs(self) -> int:
        """Count the multiply-adds of the encoder per image: projections, MLPs and the two products of attention."""
        (width, depth, mlp, _), tokens = self.config.size, self.config.tokens
        projections = (4 if self.config.gate is None else 5) * width * width
        return depth * tokens * (projections + 2 * width * mlp + 2 * width * tokens)


def _lecun_normal(layer: nn.Conv2d | nn.Linear) -> None:
    """Initialise like flax: a normal truncated at two standard deviations, with variance 1 / fan-in; zero bias."""
    std = math.sqrt(1 / layer.weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def sincos2d(height: int, width: int, channels: int, temperature: float = 10_000.0) -> Tensor:
    """Return fixed positions [1, height · width, channels]: sines and cosines of x and y at channels/4 wavelengths."""
    quarter = channels // 4
    omega = temperature ** -(torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    y, x = (position.flatten()[:, None] * omega for position in (y, x))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).float()[None]
