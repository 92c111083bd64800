"""The config of a vision transformer, and big_vision's sizes by name."""

import math
import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from nomax.models.fields import check_fields
from nomax.nn.attention import Gate, Learned
from nomax.phi import Phi


class Size(NamedTuple):
    width: int
    depth: int
    mlp: int
    heads: int


SIZES = {
    "mu": Size(32, 1, 128, 2),
    "pico": Size(
        64, 4, 256, 2
    ),  # this one and the next two are ours, for small images on a CPU; the others big_vision's
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
    """What evaluation does to an image before the model sees it, besides bringing it to the model's size and channels.

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
        """The whole of it in words."""
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
    """All that makes a ViT what it is, but for its weights. `dataclasses.asdict` of it is plain JSON."""

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
    head_bias: float = 0.0  # where the head's biases start: -10 for sigmoid losses over 21,843 classes
    head_zero: bool = True
    gelu: Gelu = "tanh"  # JAX's default; PyTorch's is "exact"
    learned_gain: Learned | None = None
    learned_alpha: Learned | None = None
    dropout: float = 0.0  # of the embedded patches and of what each block adds
    class_token: bool | None = None  # None: only where pool="tok" needs it
    norm: Norm = "tokens"  # the last LayerNorm is of the tokens, or (timm's fc_norm) of what was pooled from them
    # What its user has to know; None where nobody said it.
    classes: tuple[str, ...] | None = field(default=None, repr=False)  # the names of the head's outputs, in order
    probabilities: Probabilities | None = None  # what makes them of logits: the function of the loss in training
    preprocessing: Preprocessing | None = None

    def __post_init__(self) -> None:
        normal: dict[str, Any] = {"phi": str(Phi.parse(self.phi))}
        if isinstance(self.classes, list | tuple):
            normal["classes"] = tuple(self.classes)
        if isinstance(self.preprocessing, dict):
            normal["preprocessing"] = _preprocessing(self.preprocessing)
        if isinstance(self.image_size, list | tuple):  # a pair is a list in JSON, and one number where it is a square
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
            raise ValueError('pool="tok" pools the class token, so class_token=False cannot go with it.')
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
        """The side of a patch in pixels."""
        return parse_variant(self.variant)[1]

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the images."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """How many patches an image is high and wide."""
        return self.image[0] // self.patch, self.image[1] // self.patch

    @property
    def has_class_token(self) -> bool:
        """Whether there is a token besides the patches."""
        return self.pool == "tok" if self.class_token is None else self.class_token

    @property
    def tokens(self) -> int:
        """L, the length of the sequence."""
        return math.prod(self.grid) + self.has_class_token

    @property
    def matrix_numbers(self) -> int:
        """How many numbers the weights have, but for biases, norms and other small things."""
        width, depth, mlp, _ = self.size
        rep_size = width if self.rep_size is True else int(self.rep_size)
        blocks = depth * ((4 if self.gate is None else 5) * width * width + 2 * width * mlp)
        head = width * rep_size + (rep_size or width) * self.num_classes
        learned = self._positions if self.posemb == "learn" else 0
        return self.channels * self.patch**2 * width + learned + blocks + head

    @property
    def fixed_numbers(self) -> int:
        """How many numbers belong to the model that are no weights."""
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
    """ "S/16" to the size S and the patch 16."""
    found = re.fullmatch(r"(\w+)/([1-9]\d*)", variant) if isinstance(variant, str) else None
    if found and found[1] in SIZES:
        return SIZES[found[1]], int(found[2])
    patch = re.findall(r"\d+", str(variant))[-1:] or ["16"]
    known = {f"{size}/{patch[0]}".casefold(): f"{size}/{patch[0]}" for size in reversed(SIZES)}
    nearest = get_close_matches(str(variant).casefold(), known, n=1, cutoff=0.4)
    hint = f"did you mean {known[nearest[0]]!r}? " if nearest else ""
    raise ValueError(
        f"variant={variant!r} is unknown; {hint}Write size/patch, such as 'S/16', with one of the sizes "
        f"{', '.join(SIZES)} (capitals matter)."
    )
