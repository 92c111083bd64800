"""transformers: masks, caches, generation, training, pipelines, compilation, and what is on the disk."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import DECODER, TEXT, TRANSFORMERS, Entry, stirred, words

import nomax
from nomax import _compat
from nomax.conversion import ConversionError
from nomax.nn import InnerAttention

ENTRIES = {entry.name: entry for entry in TRANSFORMERS}
DECODERS = ["LlamaForCausalLM", "GPT2LMHeadModel", "FalconForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers = _compat.transformers()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


def converted(name: str, phi: str = "relu/L", **settings: Any) -> Any:
    model = ENTRIES[name].model(**settings)
    nomax.convert(model, phi)
    return model


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("mask", [None, "ones", "padding"])
def test_a_causal_model_never_looks_ahead(name: str, mask: str | None) -> None:
    model = converted(name)
    ids = words(2, 9)
    given: dict[str, Tensor] = {}
    if mask is not None:
        given["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        if mask == "padding":
            given["attention_mask"][1, :2] = 0
    with torch.no_grad():
        whole = model(ids, **given).logits
        later = torch.cat([ids[:, :5], words(4, 4)[2:]], 1)
        changed = model(later, **given).logits
    real = slice(2, 5) if mask == "padding" else slice(0, 5)
    assert torch.equal(whole[:, real], changed[:, real])
    assert not torch.equal(whole[:, 5:], changed[:, 5:])


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_computes_what_the_whole_sequence_does(name: str, padded: bool) -> None:
    """Prefill, then steps of one token and of several: a mask of None means something else in each."""
    model = converted(name)
    ids = words(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    if padded:
        mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, position_ids=positions).logits
        parts, cache, start = [], None, 0
        for end in (6, 7, 8, 11, 12):
            step = slice(start, end)
            given = {"attention_mask": mask[:, :end]} if padded else {}
            out = model(ids[:, step], past_key_values=cache, position_ids=positions[:, step], use_cache=True, **given)
            parts.append(out.logits)
            cache, start = out.past_key_values, end
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["BertModel", "ElectraModel", "AlbertModel", "RobertaModel", "LlamaForCausalLM", "Qwen2ForCausalLM"]
)
@pytest.mark.parametrize("phi", ["relu/L", "softmax"])
def test_packed_sequences_compute_what_padded_ones_do(name: str, phi: str) -> None:
    model = converted(name, phi)
    ids = words(3, 9)
    mask = torch.arange(9) < torch.tensor([[9], [4], [6]])
    first = 2 if name.startswith("Roberta") else 0
    positions = (mask.cumsum(1) - 1).clamp(min=0) + first
    with torch.no_grad():
        packed = nomax.conversion.pack(ids, mask.long(), first)
        assert packed["input_ids"].shape == (1, 19)
        out = nomax.conversion.unpack(model(**packed)[0], mask)
        padded = model(ids, attention_mask=mask.long(), position_ids=positions)[0]
    torch.testing.assert_close(out[mask], padded[mask], rtol=1e-4, atol=1e-5)
    assert not out[~mask].any()


def test_packed_sequences_with_a_sliding_window_are_refused() -> None:
    model = converted("MistralForCausalLM")
    with pytest.raises(ValueError, match="without a sliding window"):
        model(**nomax.conversion.pack(words(2, 9), torch.arange(9) < torch.tensor([[9], [6]])))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Entry("NemotronForCausalLM", "NemotronConfig", DECODER), "keep packed sequences apart"),
        (
            Entry("Lfm2ForCausalLM", "Lfm2Config", {**DECODER, "layer_types": ["conv", "full_attention"]}),
            "keep packed sequences apart",
        ),
        (Entry("MobileBertModel", "MobileBertConfig", TEXT), "keep packed sequences apart"),
        (
            Entry("Llama4ForCausalLM", "Llama4TextConfig", {**DECODER, "attention_chunk_size": 5}),
            "says more than their bounds",
        ),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_model_that_mixes_packed_sequences_is_refused(entry: Entry, reason: str) -> None:
    model = entry.model()
    nomax.convert(model, "relu/L")
    packed = nomax.conversion.pack(words(2, 9), torch.arange(9) < torch.tensor([[9], [6]]))
    for _ in range(2):  # the first refusal does not let the second call through
        with pytest.raises(ValueError, match=reason):
            model(**packed)


def test_the_proof_that_sequences_stay_apart_leaves_no_trace() -> None:
    model = converted("BertModel").train()
    ids, mask = words(2, 9), torch.arange(9) < torch.tensor([[9], [6]])
    before = torch.get_rng_state()
    model.eval()(**nomax.conversion.pack(ids, mask))
    assert torch.equal(torch.get_rng_state(), before)
    copied = copy.deepcopy(model)
    nomax.revert(copied)
    hooks = [len(m._forward_pre_hooks) for m in (model, copied)]
    assert hooks == [1, 0]


def test_an_encoder_that_does_not_say_so_is_not_causal(tmp_path: Path) -> None:
    """Splinter's modules have no is_causal, and its mask is None where nothing is padding."""
    model = Entry("SplinterModel", "SplinterConfig", {**TEXT, "max_position_embeddings": 64}).model()
    ids, mask = words(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    with torch.no_grad():
        before = model(ids)[0]
        for inputs in (None, {"input_ids": ids, "attention_mask": mask}):
            nomax.convert(model, "softmax", inputs=inputs)
            torch.testing.assert_close(model(ids)[0], before, rtol=1e-5, atol=1e-5)
            nomax.save_pretrained(model, tmp_path)
            torch.testing.assert_close(nomax.from_pretrained(tmp_path)(ids)[0], before, rtol=1e-5, atol=1e-5)
            nomax.revert(model)
            assert torch.equal(model(ids)[0], before)


def test_a_model_with_classes_of_attention_of_its_own_is_loaded_again(tmp_path: Path) -> None:
    """SAM looks up the implementation in a table when it is made, which does not have ours."""
    transformers = _compat.transformers()
    sides = {"hidden_size": 16, "image_size": 32, "patch_size": 8}
    config = transformers.SamConfig(
        vision_config={
            **sides, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "window_size": 2,
            "global_attn_indexes": [1], "mlp_dim": 48, "num_pos_feats": 8,
        },
        prompt_encoder_config={**sides, "mask_input_channels": 4},
        mask_decoder_config={
            "hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16,
            "num_hidden_layers": 1,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    model = stirred(transformers.SamModel(config).eval())
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.rand(1, 1, 2, 2) * 32}
    report = nomax.convert(model, "relu/L", inputs=inputs)
    assert {layer.kind for layer in report.converted} == {"sdpa", "interface"}
    nomax.save_pretrained(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(nomax.from_pretrained(tmp_path)(**inputs).pred_masks, model(**inputs).pred_masks)


def test_a_sliding_window_hides_what_is_behind_it() -> None:
    model = converted("MistralForCausalLM")  # two layers with windows of 4: the last token sees 6 back
    ids = words(1, 12)
    with torch.no_grad():
        whole = model(ids).logits[:, -1]
        far, near = ids.clone(), ids.clone()
        far[:, :5] = words(2, 5)[1:]
        near[:, 6] = (ids[:, 6] - 4) % 90 + 5
        assert torch.equal(model(far).logits[:, -1], whole)
        assert not torch.equal(model(near).logits[:, -1], whole)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "T5ForConditionalGeneration"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_continues_as_without_a_cache(name: str, cache: str) -> None:
    model = converted(name)
    ids = words(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    plain = model.generate(ids, use_cache=False, **settings)
    if cache == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids, **settings), plain)


def test_position_biases_are_added_to_the_scores() -> None:
    model = converted("T5ForConditionalGeneration")
    ids = words(1, 7)
    with torch.no_grad():
        out = model(ids, decoder_input_ids=ids).logits
        biases = [x for name, x in model.named_parameters() if "relative_attention_bias" in name]
        assert len(biases) == 2
        for bias in biases:
            bias.add_(1.0)
            changed = model(ids, decoder_input_ids=ids).logits
            assert not torch.allclose(changed, out)
            out = changed


@pytest.mark.parametrize("name", ["BertModel", "BartForConditionalGeneration"])
def test_the_padding_of_an_encoder_stays_one_row_for_each_sequence(name: str) -> None:
    model = converted(name)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    shapes: list[Any] = []
    for module in model.modules():
        if isinstance(module, InnerAttention):
            module.register_forward_hook(lambda module, args, out: shapes.append(args[3]))
    with torch.no_grad():
        model(words(2, 9), attention_mask=mask)
    assert [x for x in shapes if x is not None and x.shape[-1] == 9 and x.shape[2] != 1] == []
    assert sum(x is not None and x.shape == (2, 1, 1, 9) for x in shapes) == (2 if name == "BertModel" else 4)


def test_attention_weights_can_be_asked_for() -> None:
    model = converted("LlamaForCausalLM")
    inner = model.model.layers[0].self_attn.inner_attention
    seen: list[tuple[Tensor, ...]] = []
    inner.register_forward_hook(lambda module, args, out: seen.append((args[0], args[1], args[2], out)))
    with torch.no_grad():
        weights = model(words(2, 6), output_attentions=True).attentions[0]
    query, key, value, out = seen[0]
    scores = query @ key.repeat_interleave(2, 1).mT / query.shape[-1] ** 0.5
    torch.testing.assert_close(weights, scores.relu().tril() / torch.arange(1, 7).view(6, 1))
    torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), out)


def test_a_model_trains_under_the_trainer(tmp_path: Path) -> None:
    transformers = _compat.transformers()
    config = transformers.BertConfig(**TEXT, num_labels=2)
    model = transformers.BertForSequenceClassification(config)
    nomax.convert(model, "relu/L")
    rows = [{"input_ids": row, "labels": int(row[0] > 50)} for row in words(16, 8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        learning_rate=1e-2, save_steps=4, disable_tqdm=True,
    )  # fmt: skip
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert all(not torch.equal(x, before[name]) for name, x in model.named_parameters() if "query.weight" in name)
    again = nomax.from_pretrained(tmp_path / "checkpoint-4")
    ids = words(3, 8)
    model.eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_pipeline_runs_phi() -> None:
    transformers = _compat.transformers()
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"w{number}": number + 2 for number in range(90)}}
    words_only = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words_only, unk_token="[UNK]", pad_token="[PAD]")
    model = converted("BertModel")
    pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    calls: list[Any] = []
    for module in model.modules():
        if isinstance(module, InnerAttention):
            module.register_forward_hook(lambda *call: calls.append(call))
    short, _ = pipe(["w1 w2 w3", "w4 w5 w6 w7 w8"], batch_size=2)
    assert len(calls) == 2
    alone = pipe("w1 w2 w3")
    torch.testing.assert_close(torch.tensor(short)[:, :3], torch.tensor(alone))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM"])
def test_a_converted_model_compiles_in_one_graph(name: str) -> None:
    model = converted(name)
    ids, mask = words(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        ours, theirs = compiled(ids, attention_mask=mask)[0], model(ids, attention_mask=mask)[0]
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()])


def test_phi_is_in_the_config_and_plain_loading_is_an_error(tmp_path: Path) -> None:
    transformers = _compat.transformers()
    model = converted("BertModel", "gelu/L")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {layer["phi"] for layer in saved["nomax"]["layers"].values()} == {"gelu/L"}
    for load in (transformers.AutoModel, transformers.BertModel, transformers.AutoModelForMaskedLM):
        with pytest.raises(ValueError, match=r"nomax\.from_pretrained"):
            load.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"nomax\.from_pretrained"):
        transformers.pipeline("feature-extraction", model=str(tmp_path))
    assert "nomax" not in transformers.AutoConfig.from_pretrained(tmp_path)._attn_implementation.partition(".")[2]


def test_plain_loading_is_an_error_where_nomax_is_not_imported(tmp_path: Path) -> None:
    converted("CLIPModel").save_pretrained(tmp_path)  # whose parts have configs of their own
    code = f"import nomax._compat as c; t = c.transformers(); t.AutoModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'attn_implementation="nomax.from_pretrained"' in done.stderr
    code = f"import nomax; print(type(nomax.from_pretrained({str(tmp_path)!r})).__name__)"
    assert "CLIPModel" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


def test_the_name_of_the_implementation_alone_is_no_conversion() -> None:
    converted("BertModel")  # registers it
    model = ENTRIES["BertModel"].model(attn_implementation="nomax")
    with pytest.raises(RuntimeError, match=r"has no φ.*nomax\.convert"):
        model(words(1, 5))
    nomax.convert(model)
    model(words(1, 5))


@pytest.mark.parametrize("name", ["BertModel", "FalconForCausalLM", "CLIPModel"])
def test_some_layers_with_what_they_have_learned_survive_saving(name: str, tmp_path: Path) -> None:
    model = ENTRIES[name].model()
    report = nomax.convert(model, "relu/L", qk_norm=True, layers=[0])
    assert len(report.converted) == 1
    assert report.left
    for module in model.modules():
        if isinstance(module, InnerAttention):
            module.learn(torch.rand(4), torch.randn(4))
            torch.nn.init.normal_(module.query_norm.weight)
    from nomax.conversion.inputs import made_up

    given = made_up(model)[1]
    model.save_pretrained(tmp_path)
    again = nomax.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**given)[0], model(**given)[0])
    assert again.state_dict().keys() == model.state_dict().keys()
    nomax.revert(again)
    nomax.revert(model)
    with torch.no_grad():
        assert torch.equal(again(**given)[0], model(**given)[0])


def test_the_layers_that_are_left_stay_softmax() -> None:
    model = ENTRIES["BertModel"].model()
    ids = words(2, 7)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states
        nomax.convert(model, "relu/L", layers="encoder.layer.1.*")
        ours = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(ours[1], hidden[1])
    assert not torch.allclose(ours[2], hidden[2])


def test_attention_that_is_eager_is_converted_too() -> None:
    entry = ENTRIES["BertModel"]
    fused, eager = entry.model(), entry.model(attn_implementation="eager")
    ids = words(2, 7)
    with torch.no_grad():
        before = eager(ids)[0]
        nomax.convert(fused)
        nomax.convert(eager)
        assert torch.equal(fused(ids)[0], eager(ids)[0])
        nomax.revert(eager)
        assert torch.equal(eager(ids)[0], before)


def test_what_the_probe_does_not_reach_is_an_error() -> None:
    model = ENTRIES["BartForConditionalGeneration"].model()
    with pytest.raises(ConversionError, match="did not reach"):
        nomax.convert(
            model.model, inputs={"encoder_outputs": (torch.randn(1, 4, 32),), "decoder_input_ids": words(1, 4)}
        )
    assert nomax.convert(model).converted


def test_masks_of_minus_one_hundred_need_a_phi_that_vanishes() -> None:
    model = ENTRIES["SwinModel"].model()
    with pytest.raises(ConversionError, match="mask of about -100, from which identity does not vanish"):
        nomax.convert(model, "identity/L")
    nomax.convert(model, "sigmoid(x-log L)")


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertModel"])
def test_another_class_with_the_same_base_can_be_loaded(name: str, tmp_path: Path) -> None:
    transformers = _compat.transformers()
    other = {"BertModel": "BertForSequenceClassification", "BertForSequenceClassification": "BertModel"}[name]
    model = getattr(transformers, name)(transformers.BertConfig(**TEXT)).eval()
    nomax.convert(model)
    for module in model.modules():
        if isinstance(module, InnerAttention):
            module.learn(torch.rand(4), torch.randn(4))
    model.save_pretrained(tmp_path)
    again = nomax.from_pretrained(tmp_path, class_name=other)
    assert type(again).__name__ == other
    ours, theirs = (getattr(x, "bert", x)(words(2, 5)).last_hidden_state for x in (again, model))
    assert torch.equal(ours, theirs)
