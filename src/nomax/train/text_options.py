"""The options that `nomax train translate` and `nomax train language` share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class TextOptions:
    """What both commands can be told."""

    phi: tuple[str, ...] = ("reluformer",)
    """How scores become weights: reluformer (√2·relu/√L), softmax, relu/L, relu, sparsemax, entmax15, … Several train
    one after the other and are compared."""
    data: str = "bible-en-es"
    """A name (`nomax data list`), a folder with train, valid and test files, JSONL documents, or texts as FILE,FILE."""
    recipe: Literal["small", "iwslt"] = "small"
    """small: an hour of one CPU core. iwslt: the usual recipe for IWSLT14, not the paper's, for a GPU. The defaults
    below are the recipe's: --recipe iwslt --help shows those of iwslt."""
    out: Path | None = None
    """Folder of the run; if not given, one below runs/ with the data, recipe and φ in its name."""
    valid: str | None = None
    """Data to evaluate on during the training, where --data has no valid split."""
    documents: int | None = None
    """Learn from documents cut and joined to so many tokens, such as 128 to 4,096, or, with 0, from single segments."""
    growth: float | None = None
    """Share of the steps in which documents grow, doubling from 128 tokens to their length: what a source is for is
    learned from short ones."""
    vocabulary: int | None = None
    """Pieces of the vocabulary, learned from the training split."""

    steps: int | None = None
    """Number of steps, instead of epochs. The options from here to --seed change the recipe."""
    epochs: float | None = None
    """How often each example is seen, instead of steps."""
    batch_size: int | None = None
    """Tokens per step on a side, padding included, over all ranks and accumulated parts."""
    lr: float | None = None
    """Largest learning rate."""
    warmup: int | None = None
    """Steps of linear warm-up; if not given, at most a fifth of the steps."""
    schedule: Literal["cosine", "inverse-sqrt"] | None = None
    """How the learning rate falls after the warm-up: to 0 at the last step, or as 1/√step."""
    weight_decay: float | None = None
    """AdamW's, of matrices only."""
    clip: float | None = None
    """Largest norm of the gradient; 0 never clips."""
    label_smoothing: float | None = None
    """Share of each target that is spread over the vocabulary."""
    penalty: float | None = None
    """Weight of ReLUFormer's two penalties in the loss; 0.03 for relu/√L and 0 for other φ, if not given. The paper's
    value is not known: a number to tune."""
    normalisation_penalty: float | None = None
    """Weight of the one on sums of rows, |log Σ|, if it is not that of --penalty."""
    entropy_penalty: float | None = None
    """Weight of the one on entropies of rows, if it is not that of --penalty."""
    margin: float | None = None
    """Entropies of rows over n keys are penalised above this share of log n."""
    dim: int | None = None
    """Width of the model."""
    heads: int | None = None
    """Attention heads of a layer."""
    decoder_layers: int | None = None
    """Layers of the decoder."""
    slots: int | None = None
    """Slots of each feed-forward layer, which is a memory."""
    learned_gain: Literal["layer", "head", "none"] | None = None
    """Learn φ's gain (√2/γ), one for each layer or head; per head for relu/√L and not at all for other φ, if not
    given."""
    gamma: float | None = None
    """γ, by which relu/√L is divided, or where it starts if learned: with √(n/π) rows of a new model over n keys sum to
    about 1. Of other φ, 1."""
    memory_phi: str | None = None
    """φ of the feed-forward layers: relu, softmax, …"""
    memory_norm: bool | None = None
    """LayerNorm of what a feed-forward layer finds."""
    joined_norm: Literal["rela"] | None = None
    """ReLA's gated RMSNorm of the joined heads; with --phi relu, this is ReLA."""
    norm: Literal["pre", "post"] | None = None
    """LayerNorm of what a part reads, or of the sum to which it is added."""
    positions: Literal["sinusoidal", "rotary"] | None = None
    """How the model knows where a token is."""
    max_length: int | None = None
    """Longest segment in tokens, where --documents does not say it; longer ones are cut into parts."""
    dropout: float | None = None
    """Of the embedded tokens and of what each part adds."""
    ema: float | None = None
    """Keep an exponential moving average of the weights with this decay, evaluate and save it; 0 does not."""
    precision: Literal["fp32", "bf16"] | None = None
    """bf16: autocast, with float32 weights."""
    evaluate_every: int | None = None
    """Steps between evaluations on the validation split; 0 evaluates at the end only."""
    seed: int | None = None
    """Of the first weights, the order of the examples and dropout."""

    accumulate: int | None = None
    """Compute each batch in so many parts, to save memory. This and what follows may change when a run goes on."""
    checkpoint_every: int | None = None
    """Steps between checkpoints."""
    keep: int | None = None
    """How many checkpoints to keep."""
    compile: bool | None = None
    """torch.compile the model."""
    distribute: Literal["ddp", "fsdp"] | None = None
    """Under torchrun: every rank holds the model, or a share of it."""
    device: str = "auto"
    """cpu, cuda, or whichever there is."""
    threads: int | None = None
    """CPU threads; torch's own choice if not given."""
    tensorboard: bool = True
    """Write TensorBoard files too, if it is installed."""
    parallel: bool = False
    """Train several φ at the same time, each in a process with one thread: faster than one after the other."""
    smoke: bool = False
    """Shrink everything to seconds: shows only that it works."""
