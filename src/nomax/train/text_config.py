"""What a run of text is told, a translation's or a language model's; config.json in the run folder holds it."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from nomax.models import ReLUFormerConfig
from nomax.phi import ACTIVATIONS, ROW_MAPS, Phi
from nomax.train.loop_config import LoopConfig

SHORTEST = 128  # tokens, where documents begin to grow


@dataclass(frozen=True)
class TextConfig(LoopConfig):
    """How a ReLUFormer is trained: the model, its data, and all the numbers. `batch_size` counts tokens.

    Examples are at most model.max_length tokens long, on each side; longer pairs are cut into parts.
    """

    EVALUATED: ClassVar[str] = "valid"

    warmup: int = 4000
    weight_decay: float = 0.0
    beta2: float = 0.98
    schedule: Literal["cosine", "inverse-sqrt"] = "inverse-sqrt"

    task: Literal["translate", "language"] = "translate"
    recipe: str = "base"
    model: ReLUFormerConfig = field(default_factory=lambda: ReLUFormerConfig(8000))
    data: str = "bible-en-es"
    valid: str = ""  # other data to evaluate on during the training; "": the split of that name
    languages: tuple[str, ...] = ("en", "es")  # source and target; one for a language model
    documents: bool = False  # examples of model.max_length tokens, cut and joined from documents; else single pairs
    growth: float = 0.0  # share of the steps, the first, in which documents grow to max_length: see `stages`
    vocabulary: str = ""  # its SHA-256; "": any
    epochs: float = 0.0  # where the number of steps came from; 0 if it was given itself
    label_smoothing: float = 0.1
    # Weights of ReLUFormer's penalties in the loss. No source gives the paper's.
    normalisation_penalty: float = 0.0
    entropy_penalty: float = 0.0
    margin: float = 0.7  # of the entropy's: the share of log n that rows over n keys may have
    valid_examples: int = 0  # 0: evaluate on all of them

    @property
    def stages(self) -> dict[int, int]:
        """From which step on examples have at most how many tokens: 128, 256, … for as many steps each, then all."""
        shorter: list[int] = []
        while self.growth and SHORTEST << len(shorter) < self.model.max_length:
            shorter.append(SHORTEST << len(shorter))
        share = self.growth * self.steps / max(len(shorter), 1)
        return {round(share * place): tokens for place, tokens in enumerate([*shorter, self.model.max_length])}

    @property
    def penalised(self) -> bool:
        """Whether the penalties are in the loss."""
        return self.normalisation_penalty > 0 or self.entropy_penalty > 0

    def check(self) -> None:
        """Raise a ValueError that names the field, unless these values make sense together."""
        super().check()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1.")
        if not 0 <= self.growth < 1:
            raise ValueError(f"growth={self.growth} must be at least 0 and below 1: a share of the steps.")
        if self.growth and not self.documents:
            raise ValueError(f"growth={self.growth}: only documents grow; say how long they are with --documents.")
        for name in ("normalisation_penalty", "entropy_penalty", "margin"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of at least 0.")
        activation = Phi.parse(self.model.phi).activation
        if self.penalised and activation not in ROW_MAPS and not ACTIVATIONS[activation].nonnegative:
            raise ValueError(
                f"phi={self.model.phi!r} has weights below zero, whose sums and entropies the penalties cannot hold: "
                "pass --penalty 0, or a φ such as relu/L^0.5."
            )
        if self.batch_size < self.model.max_length:
            raise ValueError(
                f"batch_size={self.batch_size:,} tokens cannot hold an example of {self.model.max_length:,}: pass a "
                "larger --batch-size, or shorter examples (--documents, --max-length)."
            )
        if self.model.max_length < 2:
            raise ValueError(f"max_length={self.model.max_length} must be at least 2: a token and the end.")
        translates, sides = self.task == "translate", len(self.languages)
        if translates != (self.model.encoder_layers > 0) or sides != 1 + translates:
            raise ValueError(
                f"task={self.task!r} with encoder_layers={self.model.encoder_layers} and {sides} languages: a "
                "translation has an encoder and two languages, a language model no encoder and one language."
            )
