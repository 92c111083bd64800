"""Tiny models of transformers and timm, with random weights, to try conversion on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nomax import _compat

WIDTH, HEADS, WORDS = 32, 4, 99
TEXT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "vocab_size": WORDS,
}
DECODER = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
IMAGES = {**TEXT, "image_size": 16, "patch_size": 4}
del IMAGES["vocab_size"]
PAIRED = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": WORDS}
BOTH = {"text_config": {**TEXT, **SPECIAL, "max_position_embeddings": 32}, "vision_config": IMAGES}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}


@dataclass(frozen=True)
class Entry:
    """A model: its class and config class in transformers, or its name in timm, with tiny settings."""

    name: str
    config: str
    settings: dict[str, Any]
    refused: str = ""
    """Part of the reason, if it cannot be converted."""

    def model(self, **more: Any) -> Any:
        torch.manual_seed(0)
        if not self.config:
            return stirred(_compat.timm().create_model(self.name, **{**self.settings, **more}).eval())
        transformers = _compat.transformers()
        config = getattr(transformers, self.config)(**self.settings, **more)
        return stirred(getattr(transformers, self.name)(config).eval())

    @property
    def kind(self) -> str:
        """What it reads: "encoder", "decoder" or "paired" text, "images", "sound" or "both" texts and images."""
        if not self.config:
            return "images"
        if self.settings is BOTH or "vision_config" in self.settings:
            return "both"
        if self.name.startswith(("Whisper", "Wav2Vec2", "AST", "Hubert")):
            return "sound"
        if "image_size" in self.settings:
            return "images"
        if self.name.endswith("ForConditionalGeneration") or self.name == "MarianMTModel":
            return "paired"
        return "decoder" if self.name.endswith(("LMHeadModel", "ForCausalLM")) else "encoder"


def stirred(model: Any) -> Any:
    """Move parameters away from where they start: weights and scales near zero would hide what attention does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.std() < 0.1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif parameter.dim() != 2 and parameter.numel() and parameter.abs().max() < 0.1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


TRANSFORMERS = [
    Entry("BertModel", "BertConfig", TEXT),
    Entry("RobertaModel", "RobertaConfig", TEXT),
    Entry("XLMRobertaModel", "XLMRobertaConfig", TEXT),
    Entry(
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": WIDTH, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 48, "vocab_size": WORDS},
    ),
    Entry("ElectraModel", "ElectraConfig", {**TEXT, "embedding_size": 32}),
    Entry("AlbertModel", "AlbertConfig", {**TEXT, "embedding_size": 16}),
    Entry(
        "ModernBertModel",
        "ModernBertConfig",
        {
            **TEXT,
            **SPECIAL,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "global_attn_every_n_layers": 2,
            "local_attention": 4,
        },
    ),
    Entry("GPT2LMHeadModel", "GPT2Config", {**GPT, "n_positions": 64}),
    Entry("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    Entry(
        "OPTForCausalLM",
        "OPTConfig",
        {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 64},
    ),
    Entry("FalconForCausalLM", "FalconConfig", TEXT),
    Entry("LlamaForCausalLM", "LlamaConfig", DECODER),
    Entry("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 4}),
    Entry("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    Entry("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    Entry("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    Entry("GemmaForCausalLM", "GemmaConfig", {**DECODER, "head_dim": 8}),
    Entry(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Entry("Phi3ForCausalLM", "Phi3Config", DECODER),
    Entry("StableLmForCausalLM", "StableLmConfig", DECODER),
    Entry("Starcoder2ForCausalLM", "Starcoder2Config", DECODER),
    Entry("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    Entry("GraniteForCausalLM", "GraniteConfig", DECODER),
    Entry("SmolLM3ForCausalLM", "SmolLM3Config", DECODER),
    Entry(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": WIDTH,
            "num_layers": 2,
            "num_heads": HEADS,
            "d_kv": 8,
            "d_ff": 48,
            "vocab_size": WORDS,
            "decoder_start_token_id": 0,
        },
    ),
    Entry("BartForConditionalGeneration", "BartConfig", PAIRED),
    Entry("MarianMTModel", "MarianConfig", PAIRED),
    Entry("PegasusForConditionalGeneration", "PegasusConfig", PAIRED),
    Entry(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**PAIRED, **SPECIAL, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
    ),
    Entry(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        {
            **TEXT,
            "conv_dim": (16, 16),
            "conv_kernel": (8, 8),
            "conv_stride": (8, 8),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embedding_groups": 4,
            "num_conv_pos_embeddings": 8,
        },
    ),
    Entry(
        "ASTModel",
        "ASTConfig",
        {**IMAGES, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4},
    ),
    Entry("ViTModel", "ViTConfig", IMAGES),
    Entry("DeiTModel", "DeiTConfig", IMAGES),
    Entry("BeitModel", "BeitConfig", IMAGES),
    Entry("Dinov2Model", "Dinov2Config", IMAGES),
    Entry("DINOv3ViTModel", "DINOv3ViTConfig", IMAGES),
    Entry("CLIPModel", "CLIPConfig", BOTH),
    Entry("SiglipModel", "SiglipConfig", BOTH),
    Entry("SwinModel", "SwinConfig", SWIN),
    Entry("Swinv2Model", "Swinv2Config", SWIN, "softmax itself"),
    Entry("DebertaV2Model", "DebertaV2Config", TEXT, "softmax itself"),
    Entry("RoFormerModel", "RoFormerConfig", TEXT, "softmax itself"),
    Entry(
        "FSMTForConditionalGeneration",
        "FSMTConfig",
        {**PAIRED, "langs": ["en", "de"], "src_vocab_size": WORDS, "tgt_vocab_size": WORDS},
        "softmax itself",
    ),
    Entry(
        "TrOCRForCausalLM",
        "TrOCRConfig",
        {
            "d_model": WIDTH,
            "decoder_layers": 1,
            "decoder_attention_heads": HEADS,
            "decoder_ffn_dim": 48,
            "vocab_size": WORDS,
        },
        "softmax itself",
    ),
    Entry(
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": WORDS},
        "softmax itself",
    ),
    Entry(
        "MptForCausalLM",
        "MptConfig",
        {"d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "vocab_size": WORDS},
        "softmax itself",
    ),
    Entry("LongformerModel", "LongformerConfig", {**TEXT, "attention_window": 4}, "softmax itself"),
    Entry(
        "XLNetModel",
        "XLNetConfig",
        {"d_model": WIDTH, "n_layer": 2, "n_head": HEADS, "d_inner": 48, "vocab_size": WORDS},
        "softmax itself",
    ),
    Entry("MPNetModel", "MPNetConfig", TEXT, "softmax itself"),
    Entry("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}, "softmax itself"),
    Entry(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**DECODER, "head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
        "sinks",
    ),
    Entry("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 8, "sliding_window": 4}, "caps its scores"),
    Entry(
        "MambaModel",
        "MambaConfig",
        {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": WORDS},
        "computes no attention",
    ),
]

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS, "num_classes": 7}
STAGES = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "num_classes": 7}

TIMM = [
    Entry("vit_tiny_patch16_224", "", VIT),
    Entry("vit_small_patch16_224", "", {**VIT, "qk_norm": True}),
    Entry("vit_base_patch16_clip_224", "", VIT),
    Entry("vit_base_patch16_siglip_224", "", VIT),
    Entry("vit_small_patch14_dinov2", "", VIT),
    Entry("vit_small_patch14_reg4_dinov2", "", VIT),
    Entry("vit_medium_patch16_gap_240", "", VIT),
    Entry("vit_relpos_small_patch16_224", "", VIT),
    Entry("vit_srelpos_small_patch16_224", "", VIT),
    Entry("vit_small_patch16_rope_224", "", VIT),
    Entry("vit_pe_core_tiny_patch16_384", "", VIT),
    Entry("vit_small_patch16_dinov3", "", VIT),
    Entry("vit_so150m_patch16_reg4_map_256", "", VIT),
    Entry("deit_tiny_distilled_patch16_224", "", VIT),
    Entry("deit3_small_patch16_224", "", VIT),
    Entry("beit_base_patch16_224", "", VIT),
    Entry("eva02_tiny_patch14_224", "", VIT),
    Entry("eva_giant_patch14_224", "", VIT),
    Entry("flexivit_small", "", VIT),
    Entry("samvit_base_patch16", "", {**VIT, "img_size": 64}),
    Entry("naflexvit_base_patch16_gap", "", {"embed_dim": WIDTH, "depth": 2, "num_heads": HEADS, "num_classes": 7}),
    Entry("xcit_nano_12_p16_224", "", {key: value for key, value in VIT.items() if key != "patch_size"}),
    Entry("swin_tiny_patch4_window7_224", "", STAGES),
    Entry("nest_tiny", "", {"img_size": 64, "num_classes": 7}),
    Entry("pvt_v2_b0", "", {"num_classes": 7}),
    Entry("mobilevit_xxs", "", {"num_classes": 7}),
    Entry("cait_xxs24_224", "", VIT, "softmax itself"),
    Entry("convit_tiny", "", VIT, "softmax itself"),
    Entry("swinv2_tiny_window8_256", "", STAGES, "softmax itself"),
    Entry("levit_128s", "", {"num_classes": 7}, "softmax itself"),
    Entry("edgenext_xx_small", "", {"num_classes": 7}, "softmax itself"),
    Entry("tnt_s_patch16_224", "", {"img_size": 32, "depth": 1, "num_classes": 7}, "softmax itself"),
    Entry("resnet10t", "", {"num_classes": 7}, "computes no attention"),
]


def words(*shape: int) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(5, WORDS, shape, generator=torch.Generator().manual_seed(1))


def first_output(model: Callable[..., Any], inputs: dict[str, Tensor] | Tensor) -> Tensor:
    """The first floating-point tensor of what a model returns."""
    out: Any = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    while not isinstance(out, Tensor):
        out = next(iter(out.values() if hasattr(out, "values") else out))
    return out
