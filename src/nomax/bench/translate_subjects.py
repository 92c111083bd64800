"""Who takes part in `nomax bench translate`: ReLUFormers with several φ, and Hugging Face's Marian of that shape."""

import copy
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nomax import _compat
from nomax.bench.gate import Gate
from nomax.models import ReLUFormer, ReLUFormerConfig
from nomax.models.search import Hypothesis, search
from nomax.nn import Attention

INFERENCE, TRAINING, DECODING = "inference", "training", "decoding"
OURS, PLAIN, FREE, MARIAN = "ReLUFormer", "without penalties", "free attention", "Marian"
SOFTMAX, SPARSEMAX, ENTMAX = "softmax", "sparsemax", "entmax15"

BEAMS, SENTENCES, LENGTH_PENALTY = 4, 64, 0.6
SMOOTHING, WEIGHT = 0.1, 0.01  # of the labels, and of each penalty
NEVER = -30.0  # below all other logits of a new model, and finite: where nothing else is allowed, it may be chosen


class Endless(ReLUFormer):
    """A ReLUFormer whose translations end where they must: what min_new_tokens does in Hugging Face's generate."""

    def decode(self, *arguments: Any, **settings: Any) -> Tensor:
        logits = super().decode(*arguments, **settings)
        logits[..., self.config.end] = NEVER
        return logits


def transformers() -> Any:
    """Hugging Face's package, with a torchvision that works, since it imports one that it finds."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("the peer is missing: pip install transformers")
    if importlib.util.find_spec("torchvision") is not None:
        _compat.torchvision()
    return importlib.import_module("transformers")


def subjects(config: ReLUFormerConfig) -> dict[str, ReLUFormer]:
    """The same model with different attention: weights that all have are the same."""
    torch.manual_seed(0)
    ours = ReLUFormer.from_config(config)
    found = {OURS: ours, PLAIN: ours}
    for phi in (SOFTMAX, SPARSEMAX, ENTMAX):
        found[phi] = changed(ours, phi=phi, learned_gain=None)
    found[FREE] = copy.deepcopy(ours)
    for attention in _attentions(found[FREE]):
        attention._attend = lambda query, key, value, *rest: (value, None)  # type: ignore[method-assign]
    return found


def _attentions(model: ReLUFormer) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def changed(model: ReLUFormer, **changes: Any) -> ReLUFormer:
    """A model with some fields of its config changed, and the same weights as far as it has them."""
    other = ReLUFormer(**{**vars(model.config), **changes})
    own = other.state_dict()
    other.load_state_dict({name: weight for name, weight in model.state_dict().items() if name in own})
    return other


def training(name: str, model: ReLUFormer, source: Tensor, target: Tensor) -> Callable[[], None]:
    """A step: forward with label smoothing, and with the penalties for ReLUFormer, backward, and AdamW."""
    # A rate of zero: many steps on random tokens would only make the numbers strange.
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1, fused=True)

    def step() -> None:
        loss(model, source, target, penalised=name == OURS).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def loss(model: ReLUFormer, source: Tensor, target: Tensor, *, penalised: bool) -> Tensor:
    """The smoothed cross entropy of target's tokens after the first, and the penalties."""
    logits: Any = model(source, target[:, :-1], penalties=penalised)
    total: Tensor = torch.zeros(())
    if penalised:
        logits, penalties = logits
        total = WEIGHT * (penalties.normalisation + penalties.entropy)
    return total + F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=SMOOTHING)


def inference(model: ReLUFormer, source: Tensor, target: Tensor) -> Callable[[], None]:
    """The logits of every token, given those before."""

    def call() -> None:
        with torch.inference_mode():
            model(source, target[:, :-1])

    return call


def translation(model: ReLUFormer, source: Tensor, tokens: int) -> Callable[[], list[list[Hypothesis]]]:
    """Beam search of `tokens` tokens, the last of which is `end`."""
    return lambda: search(model, source, beams=BEAMS, length_penalty=LENGTH_PENALTY, max_length=tokens)


def marian(config: ReLUFormerConfig) -> Any:
    """Hugging Face's translation model in the shape of a ReLUFormer, with random weights."""
    package = transformers()
    torch.manual_seed(0)
    sides = ("encoder", "decoder")
    settings = {f"{side}_layers": getattr(config, f"{side}_layers") for side in sides}
    settings |= {f"{side}_attention_heads": config.heads for side in sides}
    settings |= {f"{side}_ffn_dim": config.slots for side in sides}
    shape = package.MarianConfig(
        vocab_size=config.vocabulary,
        d_model=config.dim,
        activation_function="relu",
        max_position_embeddings=config.max_length,
        scale_embedding=True,
        pad_token_id=config.padding,
        bos_token_id=config.begin,
        eos_token_id=config.end,
        decoder_start_token_id=config.begin,
        forced_eos_token_id=config.end,
        **settings,
    )
    return package.MarianMTModel(shape).eval()


def generation(model: Any, source: Tensor, tokens: int) -> Callable[[], Tensor]:
    """Hugging Face's beam search of as many tokens, the last of which is forced to be the end."""
    mask = torch.ones_like(source)

    def call() -> Tensor:
        with torch.inference_mode():
            found: Tensor = model.generate(
                source,
                attention_mask=mask,
                num_beams=BEAMS,
                length_penalty=LENGTH_PENALTY,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
            )
        return found

    return call


def model_gate(model: ReLUFormer, source: Tensor, target: Tensor) -> Gate:
    """Loss and gradients, penalties included, against float64, and against what plain PyTorch makes of them."""
    gate = Gate("float32", "model", OURS)
    plain = copy.deepcopy(model)
    for attention in _attentions(plain):
        attention.backend = "reference"
    try:
        exact, mine, theirs = (
            _gradients(each, source, target) for each in (copy.deepcopy(plain).double(), model, plain)
        )
    except Exception as error:  # a crash is a wrong result too
        gate.failure = f"{type(error).__name__}: {error}"
        return gate
    for what, want in exact.items():
        gate.error[what] = float((mine[what] - want).abs().max())
        error_of_peer = float((theirs[what] - want).abs().max())
        # Of thousands of sums, some round better there by chance, and others here.
        rounding = 4 * torch.finfo(torch.float32).eps * float(want.abs().max())
        gate.allowed[what] = max(2 * error_of_peer, rounding)
    gate.green = all(gate.error[what] <= gate.allowed[what] for what in gate.error)  # a NaN fails
    return gate


def _gradients(model: ReLUFormer, source: Tensor, target: Tensor) -> dict[str, Tensor]:
    total = loss(model, source, target, penalised=True)
    weights = {
        "gradient of the embedding": model.embedding.weight,
        **{f"gradient of {name}": weight for name, weight in _attentions(model)[-1].named_parameters()},
    }
    gradients = torch.autograd.grad(total, list(weights.values()))
    return {"loss": total.detach().double(), **dict(zip(weights, (g.double() for g in gradients), strict=True))}


def decoding_gate(model: ReLUFormer, source: Tensor, tokens: int) -> Gate:
    """Whether translations are as long as claimed, and their scores those of the whole texts read without a cache."""
    config, gate = model.config, Gate("float32", f"{tokens} tokens", OURS)
    found = translation(model, source, tokens)()
    lengths = {len(hypothesis.tokens) + 1 for hypotheses in found for hypothesis in hypotheses}
    if lengths != {tokens}:
        gate.failure = f"translations of {sorted(lengths)} tokens instead of {tokens}"
        return gate
    texts = torch.tensor([[config.begin, *hypotheses[0].tokens, config.end] for hypotheses in found])
    with torch.inference_mode():
        logits = model.decode(texts[:, :-1], model.encode(source)).double()
        logits[..., [config.padding, config.begin]] = -torch.inf
        log_p = logits.log_softmax(2).gather(2, texts[:, 1:, None])[..., 0]
    exact = log_p.sum(1) / ((5 + tokens) / 6) ** LENGTH_PENALTY
    scores = torch.tensor([hypotheses[0].score for hypotheses in found], dtype=torch.float64)
    gate.error["score"] = float((scores - exact).abs().max())
    gate.allowed["score"] = 1e-4 * float(exact.abs().max())
    gate.green = gate.error["score"] <= gate.allowed["score"]
    return gate


def marian_fault(found: Tensor, tokens: int, config: ReLUFormerConfig) -> str | None:
    """Why a result of `generate` is not what was asked for; None if it is."""
    if found.shape[1] != tokens + 1 or not (found[:, -1] == config.end).all():
        return f"its translations are {list(found.shape)}, not {tokens} tokens after the first, the end the last"
    if ((found[:, 1:-1] == config.end) | (found[:, 1:-1] == config.padding)).any():
        return "some of its translations end too early"
    return None
