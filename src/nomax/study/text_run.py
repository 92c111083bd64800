"""One run of a study of text: a ReLUFormer is trained, and some of what it does is measured."""

from dataclasses import dataclass
from typing import Any

from nomax.models import ReLUFormerConfig
from nomax.phi import Phi
from nomax.study.row import TextRow
from nomax.study.run import Run
from nomax.train import TextConfig
from nomax.train.phis import spoken

NAMES = {"softmax": "softmax", "sparsemax": "sparsemax", "entmax15": "1.5-entmax"}
# ReLUFormer's φ with a learned gain, by which of its losses, of normalisation and of entropy, are in the training.
KINDS = {
    (True, True): "ReLUFormer",
    (True, False): "without the entropy loss",
    (False, True): "without the normalisation loss",
    (False, False): "the factor alone",
}


@dataclass(frozen=True)
class TextRun(Run):
    """A configuration of a ReLUFormer, and the measurements that follow the training. The test loss is always one."""

    config: TextConfig
    measures: tuple[str, ...] = ()
    """Which others: names of nomax.study.text_measures.MEASURES."""
    test_pairs: int = 0
    """How many pairs of the test split they look at, in whole documents from the first; 0: all of them."""

    @property
    def row(self) -> type[TextRow]:
        """What its results are written into."""
        return TextRow

    @property
    def macs(self) -> int:
        """Multiply-adds for a token of each side, where sequences are as long as they may be."""
        return macs(self.config.model)

    @property
    def particulars(self) -> dict[str, Any]:
        """What rows of text have beyond the common columns."""
        model = self.config.model
        return {
            "variant": f"{model.dim} wide, {model.encoder_layers}+{model.decoder_layers} layers, {model.slots} slots",
            "tokens": model.max_length,
            "task": self.config.task,
            "attention": attention_name(self.config),
            "memory": f"{spoken(model.memory_phi)}{' + LN' if model.memory_norm else ''}",
            "slots": model.slots,
            "documents": self.config.documents,
            "vocabulary": model.vocabulary,
            "gamma": model.gamma,
            "penalty": max(self.config.normalisation_penalty, self.config.entropy_penalty),
        }


def attention_name(config: TextConfig) -> str:
    """The kind of attention, in the words of the paper where it is one of its kinds."""
    model, phi = config.model, Phi.parse(config.model.phi)
    if phi.activation in NAMES:
        return NAMES[phi.activation]
    if model.joined_norm == "rela":
        return "ReLA"
    if model.learned_gain is None:
        return spoken(model.phi)
    return KINDS[config.normalisation_penalty > 0, config.entropy_penalty > 0]


def macs(model: ReLUFormerConfig) -> int:
    """Multiply-adds of a model for a token of each side: projections, memories, logits, and rows of attention."""
    width, length = model.dim, model.max_length
    memory, projections = 2 * model.slots * width, 4 * width * width
    encoder = projections + 2 * length * width + memory
    crossing = projections + 2 * length * width if model.encoder_layers else 0
    decoder = projections + length * width + crossing + memory  # a causal row has half of the keys, in the mean
    return model.encoder_layers * encoder + model.decoder_layers * decoder + model.vocabulary * width
