"""Many models of transformers and timm: what conversion does to each, and the page of the docs that says so.

NOMAX_WRITE=1 pytest tests/conversion/test_conversion_matrix.py -k page writes the page.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_attention import in_place_of_softmax
from torch import Tensor
from zoo import TIMM, TRANSFORMERS, Entry, first_output, words

import nomax
from nomax import _compat
from nomax.conversion import ConversionError
from nomax.conversion.inputs import made_up

PAGE = Path(__file__).parents[2] / "docs" / "converted.md"
ENTRIES = [*TRANSFORMERS, *TIMM]
POSSIBLE = [entry for entry in ENTRIES if not entry.refused]
TEXTS = [entry for entry in POSSIBLE if entry.kind in ("encoder", "decoder", "paired")]
NEAR = 1e-5  # of the largest number of the output, if that is above 1


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers = _compat.transformers()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


def inputs(entry: Entry, model: Any) -> dict[str, Tensor] | Tensor:
    """Some inputs, in text with padding where the model's kind of text has it."""
    if entry.kind in ("encoder", "decoder", "paired"):
        named = {"input_ids": words(2, 9), "attention_mask": padding(entry)}
        return {**named, "decoder_input_ids": words(2, 5)} if entry.kind == "paired" else named
    args, named = made_up(model)
    return named or args[0]


def padding(entry: Entry) -> Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    if entry.kind == "decoder":
        mask[1, :4] = 0
    else:
        mask[1, 5:] = 0
    return mask


def seen(entry: Entry, out: Tensor) -> Tensor:
    """The part of an output that means something: no padding."""
    if entry.kind in ("encoder", "decoder"):
        return out[padding(entry).bool()]
    return out


def near(ours: Tensor, theirs: Tensor) -> None:
    scale = float(theirs.abs().max())
    assert scale > 0
    assert float((ours - theirs).abs().max()) <= NEAR * max(scale, 1.0)


def each(entries: list[Entry]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=lambda entry: entry.name)


@each(POSSIBLE)
def test_softmax_relu_and_the_way_back(entry: Entry) -> None:
    model = entry.model()
    given = inputs(entry, model)
    keys = list(model.state_dict())
    with torch.no_grad():
        original = first_output(model, given)
        report = nomax.convert(model, "softmax")
        assert report.converted
        assert not report.left
        near(seen(entry, first_output(model, given)), seen(entry, original))

        nomax.convert(model, "relu/L")
        assert list(model.state_dict()) == keys
        relu = first_output(model, given)
        eager = {"attn_implementation": "eager"} if entry.config and entry.name != "FalconForCausalLM" else {}
        oracle = entry.model(**eager)
        with in_place_of_softmax(oracle):
            near(seen(entry, relu), seen(entry, first_output(oracle, given)))
        assert float((seen(entry, relu) - seen(entry, original)).abs().max()) > 1e-4  # softmax would be another number

        nomax.revert(model)
        assert torch.equal(first_output(model, given), original)


@each(TEXTS)
def test_padding_does_not_leak(entry: Entry) -> None:
    model = entry.model()
    nomax.convert(model, "relu/L")
    given = inputs(entry, model)
    assert isinstance(given, dict)
    other = torch.where(padding(entry).bool(), given["input_ids"], words(3, 9)[1:])
    with torch.no_grad():
        out, changed = (first_output(model, {**given, "input_ids": ids}) for ids in (given["input_ids"], other))
        longer = torch.ones(2, 9, dtype=torch.long)
        wrong = first_output(model, {**given, "attention_mask": longer})
    assert torch.equal(seen(entry, out), seen(entry, changed))
    assert not torch.allclose(seen(entry, out), seen(entry, wrong))  # the mask matters


@each(POSSIBLE)
def test_gradients_reach_every_parameter_that_they_reached(entry: Entry) -> None:
    model = entry.model()
    given = inputs(entry, model)

    def reached() -> set[str]:
        model.zero_grad()
        out = first_output(model, given)
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        assert all(bool(x.isfinite().all()) for x in gradients.values())
        return {name for name, x in gradients.items() if bool(x.any())}

    before = reached()
    nomax.convert(model, "gelu/L")
    # Softmax does not change if all keys move alike, so its key biases have no gradient but rounding; φ's have.
    assert {name for name in before - reached() if "key_norm" not in name} == set()


@each(POSSIBLE)
def test_saving_and_loading_keep_the_output(entry: Entry, tmp_path: Path) -> None:
    model = entry.model()
    nomax.convert(model, "relu/L")
    given = inputs(entry, model)
    settings = None if entry.config else entry.settings
    nomax.save_pretrained(model, tmp_path, settings)
    again = nomax.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(first_output(again, given), first_output(model, given))


@each([entry for entry in ENTRIES if entry.refused])
def test_what_would_go_on_with_softmax_is_refused_by_name(entry: Entry) -> None:
    model = entry.model()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ConversionError, match=entry.refused) as error:
        nomax.convert(model, "relu/L")
    assert type(model).__name__ in str(error.value)
    assert {name: type(module) for name, module in model.named_modules()} == before
    if entry.config:
        assert model.config._attn_implementation in ("sdpa", "eager")
        assert not hasattr(model.config, "nomax")


def row(entry: Entry) -> str:
    model = entry.model()
    name = entry.name if entry.config else f"`{entry.name}`"
    try:
        report = nomax.convert(model, "relu/L")
    except ConversionError as error:
        text = str(error)
        layer = re.search(r"\((\w+)\): (.*)", text)
        why = f"`{layer[1]}`: {layer[2]}" if layer else "it computes no attention"
        return f"| {name} | refused | {why} |"
    kinds = sorted({f"`{layer.module}` ({layer.kind})" for layer in report.converted})
    return f"| {name} | {len(report.converted)} | {', '.join(kinds)} |"


def page() -> str:
    head = PAGE.read_text(encoding="utf-8").partition("<!-- written by its test -->")[0]
    tables = []
    for title, entries in (("transformers", TRANSFORMERS), ("timm", TIMM)):
        count = sum(not entry.refused for entry in entries)
        tables.append(
            f"## {title}\n\n{count} of these {len(entries)} are converted, the others refused.\n\n"
            "| model | attention layers | what they are |\n|---|---|---|\n" + "\n".join(map(row, entries))
        )
    return f"{head}<!-- written by its test -->\n\n" + "\n\n".join(tables) + "\n"


def test_the_page_says_what_happens() -> None:
    assert min(sum(not entry.refused for entry in entries) for entries in (TRANSFORMERS, TIMM)) >= 20
    if os.environ.get("NOMAX_WRITE"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()
