"""Thirty architectures of transformers and diffusers, from small configs with random weights.

`ARCHITECTURES[name].build(seed)` gives a model in train mode, with the dropout that its config has by default, and a
sample: keyword arguments that make the model return its training loss. Widths and depths are small, but depths, lengths
and vocabularies stand in proportions that occur: activations outweigh parameters, as they do when memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.support.meter import LiveMeter, storage_bytes
from tests.support.zoo import Sample, call, loss_of, tensors_of

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]

VOCABULARY, WIDTH, LAYERS, HEADS = 500, 64, 4, 4
BATCH, LENGTH = 4, 64
NO_SPECIAL_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table. kind: the class of the library that is trained."""

    name: str
    family: str
    kind: str
    build: Callable[[int], tuple[nn.Module, dict[str, Any]]]


ARCHITECTURES: dict[str, Architecture] = {}


def architecture(family: str, kind: str, into: dict[str, Architecture] = ARCHITECTURES) -> Callable[[Build], Build]:
    """Enter a model into a table, built after seeding the generator."""

    def enter(build: Build) -> Build:
        def seeded(seed: int) -> tuple[nn.Module, dict[str, Any]]:
            torch.manual_seed(seed)
            net, sample = build()
            return net.train(), sample

        name = build.__name__
        into[name] = Architecture(name, family, kind, seeded)
        return build

    return enter


def token_ids(*shape: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, below, shape)


def language_sample() -> dict[str, Any]:
    ids = token_ids(BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def masked_sample() -> dict[str, Any]:
    """A padded batch for a masked language model."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, LENGTH - 10 :] = 0
    return {"input_ids": token_ids(BATCH, LENGTH), "attention_mask": mask, "labels": token_ids(BATCH, LENGTH)}


def images(size: int, channels: int = 3, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def class_labels(classes: int = 2) -> torch.Tensor:
    return torch.randint(0, classes, (BATCH,))


# -- decoders ---------------------------------------------------------------------------------------------------------


@architecture("decoder", "GPT2LMHeadModel")
def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, **NO_SPECIAL_TOKENS
    )
    return GPT2LMHeadModel(config), language_sample()


@architecture("decoder", "LlamaForCausalLM")
def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        **NO_SPECIAL_TOKENS,
    )
    return LlamaForCausalLM(config), language_sample()


@architecture("decoder", "Gemma2ForCausalLM")
def gemma2() -> tuple[nn.Module, dict[str, Any]]:
    """Sliding windows in every other layer, scores and logits capped by tanh."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
        **NO_SPECIAL_TOKENS,
    )
    return Gemma2ForCausalLM(config), language_sample()


@architecture("decoder", "BloomForCausalLM")
def bloom() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **NO_SPECIAL_TOKENS)
    return BloomForCausalLM(config), language_sample()


# -- encoders ---------------------------------------------------------------------------------------------------------


@architecture("encoder", "BertForMaskedLM")
def bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
    )
    return BertForMaskedLM(config), masked_sample()


@architecture("encoder", "DebertaV2ForMaskedLM")
def deberta_v2() -> tuple[nn.Module, dict[str, Any]]:
    """With the relative attention of the published checkpoints."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    config = DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        relative_attention=True,
        position_buckets=32,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
    )
    return DebertaV2ForMaskedLM(config), masked_sample()


@architecture("encoder", "ModernBertForMaskedLM")
def modernbert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        local_attention=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return ModernBertForMaskedLM(config), masked_sample()


# -- encoders with decoders -------------------------------------------------------------------------------------------


@architecture("encoder-decoder", "T5ForConditionalGeneration")
def t5() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=16,
        d_ff=4 * WIDTH,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=HEADS,
        decoder_start_token_id=0,
    )
    sample = {"input_ids": token_ids(BATCH, LENGTH), "labels": token_ids(BATCH, 48), "use_cache": False}
    return T5ForConditionalGeneration(config), sample


@architecture("encoder-decoder", "BartForConditionalGeneration")
def bart() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
    )
    sample = {"input_ids": token_ids(BATCH, LENGTH), "labels": token_ids(BATCH, 48), "use_cache": False}
    return BartForConditionalGeneration(config), sample


# -- state spaces and other recurrences -------------------------------------------------------------------------------


@architecture("state space", "MambaForCausalLM")
def mamba() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, state_size=8, **NO_SPECIAL_TOKENS)
    ids = token_ids(BATCH, 32)
    return MambaForCausalLM(config), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


@architecture("state space", "Mamba2ForCausalLM")
def mamba2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        state_size=16,
        head_dim=16,
        num_heads=4,
        n_groups=1,
        chunk_size=16,
        **NO_SPECIAL_TOKENS,
    )
    return Mamba2ForCausalLM(config), language_sample()


@architecture("state space", "RecurrentGemmaForCausalLM")
def recurrent_gemma() -> tuple[nn.Module, dict[str, Any]]:
    """Two gated linear recurrences to one local attention."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    config = RecurrentGemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=6 * WIDTH,
        lru_width=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        attention_window_size=32,
        **NO_SPECIAL_TOKENS,
    )
    ids = token_ids(BATCH, 32)
    return RecurrentGemmaForCausalLM(config), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


# -- mixtures of experts ----------------------------------------------------------------------------------------------


@architecture("mixture of experts", "MixtralForCausalLM")
def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        **NO_SPECIAL_TOKENS,
    )
    return MixtralForCausalLM(config), language_sample()


@architecture("mixture of experts", "Qwen2MoeForCausalLM")
def qwen2_moe() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        **NO_SPECIAL_TOKENS,
    )
    return Qwen2MoeForCausalLM(config), language_sample()


# -- audio ------------------------------------------------------------------------------------------------------------


@architecture("audio", "WhisperForConditionalGeneration")
def whisper() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=20,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_source_positions=64,
        max_target_positions=64,
        decoder_start_token_id=1,
        **NO_SPECIAL_TOKENS | {"pad_token_id": 0},
    )
    sample = {"input_features": torch.randn(BATCH, 20, 128), "labels": token_ids(BATCH, 32), "use_cache": False}
    return WhisperForConditionalGeneration(config), sample


@architecture("audio", "Wav2Vec2ForCTC")
def wav2vec2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        conv_dim=(32, 32, 32, 32, 32, 32, 32),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    return Wav2Vec2ForCTC(config), {"input_values": torch.randn(BATCH, 16000), "labels": token_ids(BATCH, 6, below=32)}


@architecture("audio", "ASTForAudioClassification")
def audio_spectrogram_transformer() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ASTConfig, ASTForAudioClassification

    config = ASTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_length=96,
        num_mel_bins=64,
        num_labels=10,
    )
    return ASTForAudioClassification(config), {"input_values": torch.randn(BATCH, 96, 64), "labels": class_labels(10)}


# -- vision -----------------------------------------------------------------------------------------------------------


@architecture("vision", "ViTForImageClassification")
def vit() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
    )
    return ViTForImageClassification(config), {"pixel_values": images(32), "labels": class_labels()}


@architecture("vision", "SwinForImageClassification")
def swin() -> tuple[nn.Module, dict[str, Any]]:
    """Shifted windows, and stochastic depth from its default config."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=64, patch_size=4, embed_dim=24, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=4)
    return SwinForImageClassification(config), {"pixel_values": images(64), "labels": class_labels()}


@architecture("vision", "ConvNextForImageClassification")
def convnext() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 4, 2], image_size=128)
    return ConvNextForImageClassification(config), {"pixel_values": images(128), "labels": class_labels()}


# -- segmentation and detection ---------------------------------------------------------------------------------------


@architecture("segmentation", "SegformerForSemanticSegmentation")
def segformer() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[3, 4, 6, 3],
        hidden_sizes=[16, 32, 64, 128],
        num_attention_heads=[1, 2, 4, 8],
        decoder_hidden_size=64,
        num_labels=8,
    )
    sample = {"pixel_values": images(64), "labels": torch.randint(0, 8, (BATCH, 64, 64))}
    return SegformerForSemanticSegmentation(config), sample


@architecture("detection", "DetrForObjectDetection")
def detr() -> tuple[nn.Module, dict[str, Any]]:
    """Boxes are matched with queries by SciPy, in the middle of the loss."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 24, 32, 64],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        num_queries=20,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        num_labels=5,
    )
    boxes = [torch.rand(3, 4) * 0.4 + 0.2 for _ in range(BATCH)]
    labels = [{"class_labels": torch.randint(0, 5, (3,)), "boxes": found} for found in boxes]
    return DetrForObjectDetection(config), {"pixel_values": images(256), "labels": labels}


# -- diffusion --------------------------------------------------------------------------------------------------------


class Regression(nn.Module):
    """Trains a diffusion model as its training scripts do: mean square distance of what it returns from a target."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, target: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(**inputs).sample.float(), target)


class ControlledRegression(nn.Module):
    """The same with a control network beside a frozen model."""

    def __init__(self, control: nn.Module, net: nn.Module) -> None:
        super().__init__()
        self.control, self.net = control, net.requires_grad_(False)

    def forward(self, target: torch.Tensor, controlnet_cond: torch.Tensor, **inputs: Any) -> torch.Tensor:
        control = self.control(controlnet_cond=controlnet_cond, **inputs)
        predicted = self.net(
            **inputs,
            down_block_additional_residuals=control.down_block_res_samples,
            mid_block_additional_residual=control.mid_block_res_sample,
        ).sample
        return nn.functional.mse_loss(predicted.float(), target)


STABLE_DIFFUSION: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "layers_per_block": 2,
    "norm_num_groups": 8,
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
}


def noise_sample() -> dict[str, Any]:
    return {
        "sample": images(16, 4),
        "timestep": torch.randint(0, 1000, (BATCH,)),
        "encoder_hidden_states": torch.randn(BATCH, 12, 32),
        "target": images(16, 4),
    }


def conditional_unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=16, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **STABLE_DIFFUSION)


@architecture("diffusion", "UNet2DConditionModel")
def unet2d_condition() -> tuple[nn.Module, dict[str, Any]]:
    return Regression(conditional_unet()), noise_sample()


@architecture("diffusion", "ControlNetModel")
def controlnet() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import ControlNetModel

    control = ControlNetModel(conditioning_embedding_out_channels=(8, 16), **STABLE_DIFFUSION)
    return ControlledRegression(control, conditional_unet()), {**noise_sample(), "controlnet_cond": images(32)}


@architecture("diffusion", "DiTTransformer2DModel")
def dit() -> tuple[nn.Module, dict[str, Any]]:
    from diffusers import DiTTransformer2DModel

    net = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=LAYERS,
        sample_size=16,
        num_embeds_ada_norm=100,
        norm_num_groups=8,
    )
    sample = {
        "hidden_states": images(16, 4),
        "timestep": torch.randint(0, 100, (BATCH,)),
        "class_labels": torch.randint(0, 100, (BATCH,)),
        "target": images(16, 8),
    }
    return Regression(net), sample


@architecture("diffusion", "FluxTransformer2DModel")
def flux() -> tuple[nn.Module, dict[str, Any]]:
    """Two streams that attend to each other, then one."""
    from diffusers import FluxTransformer2DModel

    net = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    side = 8
    places = torch.zeros(side, side, 3)
    places[..., 1] = torch.arange(side)[:, None]
    places[..., 2] = torch.arange(side)[None]
    sample = {
        "hidden_states": torch.randn(BATCH, side * side, 16),
        "encoder_hidden_states": torch.randn(BATCH, 24, 32),
        "pooled_projections": torch.randn(BATCH, 32),
        "timestep": torch.rand(BATCH),
        "img_ids": places.reshape(-1, 3),
        "txt_ids": torch.zeros(24, 3),
        "target": torch.randn(BATCH, side * side, 16),
    }
    return Regression(net), sample


@architecture("diffusion", "AutoencoderKL")
def autoencoder_kl() -> tuple[nn.Module, dict[str, Any]]:
    """Draws its latent from the posterior in the middle."""
    from diffusers import AutoencoderKL

    net = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=2,
        norm_num_groups=8,
    )
    pixels = images(32)
    return Regression(net), {"sample": pixels, "sample_posterior": True, "target": pixels.clone()}


# -- several modes ----------------------------------------------------------------------------------------------------


@architecture("multimodal", "CLIPModel")
def clip() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import CLIPConfig, CLIPModel

    common = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 3}
    text = {**common, "vocab_size": VOCABULARY, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
    vision = {**common, "num_attention_heads": HEADS, "image_size": 32, "patch_size": 4}
    config = CLIPConfig(
        text_config={**text, **NO_SPECIAL_TOKENS, "eos_token_id": VOCABULARY - 1},
        vision_config=vision,
        projection_dim=32,
    )
    ids = token_ids(BATCH, 32, below=VOCABULARY - 1)
    ids[:, -1] = VOCABULARY - 1
    return CLIPModel(config), {"input_ids": ids, "pixel_values": images(32), "return_loss": True}


@architecture("multimodal", "BlipForConditionalGeneration")
def blip() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BlipConfig, BlipForConditionalGeneration

    common = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 3}
    text = {**common, "vocab_size": VOCABULARY, "num_attention_heads": HEADS, "encoder_hidden_size": WIDTH}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}
    config = BlipConfig(
        text_config={**text, **tokens, "max_position_embeddings": LENGTH},
        vision_config={**common, "num_attention_heads": HEADS, "image_size": 32, "patch_size": 4},
        projection_dim=32,
    )
    ids = token_ids(BATCH, 32)
    return BlipForConditionalGeneration(config), {"pixel_values": images(32), "input_ids": ids, "labels": ids.clone()}


@architecture("multimodal", "LlavaForConditionalGeneration")
def llava() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    image_token = VOCABULARY - 1
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        **NO_SPECIAL_TOKENS,
    )
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        image_size=32,
        patch_size=8,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=image_token)
    ids = token_ids(BATCH, 48, below=image_token)
    labels = ids.clone()
    ids[:, 4:20] = image_token  # 4 by 4 patches
    labels[:, 4:20] = -100
    return LlavaForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": images(32),
        "labels": labels,
        "use_cache": False,
    }


# -- what a step holds ------------------------------------------------------------------------------------------------


def resident_tensors(net: nn.Module, sample: Sample) -> Iterator[torch.Tensor]:
    """What is held before the step: parameters, buffers, inputs, and tensors that are plain attributes."""
    yield from net.parameters()
    yield from net.buffers()
    yield from (value for module in net.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    yield from tensors_of([sample])


def train_once(net: nn.Module, sample: Sample) -> Any:
    """One step whose output is held to the end."""
    output = call(net, sample)
    loss_of(output).backward()
    return output


def live_activation_peak(net: nn.Module, sample: Sample) -> int:
    """Bytes that one step holds at its peak beyond parameters, buffers and inputs, gradients included."""
    net.zero_grad()
    meter = LiveMeter()
    meter.register(list(resident_tensors(net, sample)))
    with meter:
        output = train_once(net, sample)
    del output
    net.zero_grad()
    return meter.peak_bytes - storage_bytes(resident_tensors(net, sample))
