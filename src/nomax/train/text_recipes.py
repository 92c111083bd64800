"""Recipes of text: plain functions that return a configuration. Every number can be changed afterwards."""

from typing import Any

from nomax.models import ReLUFormerConfig
from nomax.nn import RELUFORMER
from nomax.phi import Phi
from nomax.train.text_config import TextConfig

# How much ReLUFormer's penalties count in the loss. The paper's weight is not known to us: this is ours, to be tuned.
PENALTY = 0.03
# Where γ starts: √(n/π) for n = 128. The rows of a new model then sum to about 1, which the penalties ask for.
GAMMA = 6.4


def small(task: str = "translate", vocabulary: int = 4000, phi: str = RELUFORMER, **model: Any) -> TextConfig:
    """A small model on a small corpus, such as the Bible, in about an hour of one CPU core.

    nomax train translate --data bible-en-es --phi reluformer softmax --parallel. 3 + 3 layers of width 192 (a language
    model has 4), 2,000 steps of 4,096 tokens: 8 million, about nine times the Bible. AdamW with betas (0.9, 0.98) at a
    learning rate of 2e-3, 400 steps of warm-up and a cosine, label smoothing of 0.1 (a language model has none).
    """
    layers = {"encoder_layers": 3, "decoder_layers": 3} if task == "translate" else {"decoder_layers": 4}
    size = {"dim": 192, "heads": 3, "slots": 768, "dropout": 0.1, "max_length": 256, **layers}
    return _made(
        task,
        phi,
        vocabulary,
        {**size, **model},
        recipe="small",
        steps=2000,
        lr=2e-3,
        warmup=400,
        schedule="cosine",
        checkpoint_every=200,
        evaluate_every=400,
    )


def iwslt(task: str = "translate", vocabulary: int = 10_000, phi: str = RELUFORMER, **model: Any) -> TextConfig:
    """The usual recipe for IWSLT14 German to English: not the paper's, whose numbers of this kind are not known to us.

    nomax train translate --recipe iwslt --data FOLDER --languages de en --phi reluformer softmax --precision bf16.
    6 + 6 layers of width 512, 1,024 slots, 4 heads, dropout 0.3; Adam (0.9, 0.98) at 5e-4, 4,000 steps of warm-up, then
    1/√step; 4,096 tokens a step, label smoothing 0.1. 50,000 steps, the norm of gradients clipped at 1 and post-norm
    are our choices. Meant for a GPU. Evaluate it with --beams 5.
    """
    size = {"dim": 512, "heads": 4, "slots": 1024, "dropout": 0.3, "norm": "post", "max_length": 512}
    return _made(
        task,
        phi,
        vocabulary,
        {**size, **model},
        recipe="iwslt",
        steps=50_000,
        lr=5e-4,
        warmup=4000,
        schedule="inverse-sqrt",
        checkpoint_every=1000,
        evaluate_every=1000,
    )


RECIPES = {"small": small, "iwslt": iwslt}


def is_reluformers(phi: str) -> bool:
    """Whether φ is relu/√L, with any factor: the one that the penalties and a learned gain are for."""
    parsed = Phi.parse(phi)
    return parsed.activation == "relu" and parsed.alpha == 0.5


def _made(task: str, phi: str, vocabulary: int, model: dict[str, Any], **settings: Any) -> TextConfig:
    """ReLUFormer's own φ learns its gain per head and has penalties; others, its peers, are trained without."""
    own = is_reluformers(phi)
    defaults: dict[str, Any] = {"learned_gain": "head" if own else None}
    if Phi.parse(phi) == Phi.parse(RELUFORMER):  # a φ with a factor of its own says itself where the gain starts
        defaults["gamma"] = GAMMA
    if task == "language":
        defaults["encoder_layers"] = 0
        settings |= {"task": "language", "label_smoothing": 0.0, "languages": ("en",)}
    weight = PENALTY if own else 0.0
    return TextConfig(
        model=ReLUFormerConfig(vocabulary, phi=phi, **{**defaults, **model}),
        normalisation_penalty=weight,
        entropy_penalty=weight,
        **settings,
    )
