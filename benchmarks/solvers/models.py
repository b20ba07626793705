"""The models whose training steps are the instances of the solvers' table: real families, moderate sizes.

`MODELS[name]()` gives a model in train mode and its sample. From `densenet` to `fno` they are what no library at hand
offers; those after it are small enough for a mixed-integer programme of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Sample = dict[str, Any] | tuple[Any, ...] | torch.Tensor
Build = Callable[[], tuple[nn.Module, Sample]]
MODELS: dict[str, Build] = {}

VOCABULARY = 1000


def model(build: Build) -> Build:
    """Enter a model into `MODELS`, built after seeding the generator."""

    def seeded() -> tuple[nn.Module, Sample]:
        torch.manual_seed(0)
        net, sample = build()
        return net.train(), sample

    MODELS[build.__name__] = seeded
    return build


def _text(batch: int = 4, length: int = 256) -> Sample:
    ids = torch.randint(0, VOCABULARY, (batch, length))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


@model
def gpt2() -> tuple[nn.Module, Sample]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=256, n_layer=12, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config), _text()


def _llama(layers: int, attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@model
def llama() -> tuple[nn.Module, Sample]:
    return _llama(8, "sdpa"), _text()


@model
def llama_eager() -> tuple[nn.Module, Sample]:
    return _llama(4, "eager"), _text()


@model
def llama_32_layers() -> tuple[nn.Module, Sample]:
    return _llama(32, "sdpa"), _text(2, 128)


@model
def bert() -> tuple[nn.Module, Sample]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024
    )
    return BertForMaskedLM(config), {
        "input_ids": torch.randint(0, VOCABULARY, (4, 256)),
        "labels": torch.randint(0, VOCABULARY, (4, 256)),
    }


@model
def vit() -> tuple[nn.Module, Sample]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=64, patch_size=4, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 64, 64),
        "labels": torch.randint(0, 2, (4,)),
    }


@model
def resnet50() -> tuple[nn.Module, Sample]:
    """True depth and block type, a quarter of the width."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 6, 3], layer_type="bottleneck"
    )
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, 96, 96),
        "labels": torch.randint(0, 2, (8,)),
    }


@model
def t5() -> tuple[nn.Module, Sample]:
    """Four layers of encoder and four of decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_decoder_layers=4, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), {
        "input_ids": torch.randint(0, VOCABULARY, (4, 192)),
        "labels": torch.randint(0, VOCABULARY, (4, 128)),
        "use_cache": False,
    }


@model
def unet() -> tuple[nn.Module, Sample]:
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=32, layers_per_block=2, block_out_channels=(32, 64, 128, 128), norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return net, {"sample": torch.randn(4, 3, 32, 32), "timestep": torch.tensor([3, 5, 7, 9])}


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.before = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.before(x)], 1)


@model
def densenet() -> tuple[nn.Module, Sample]:
    """DenseNet-BC: three dense blocks of eight layers, growth 12 (Huang et al., arXiv 1608.06993)."""
    channels, growth = 24, 12
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for block in range(3):
        for _ in range(8):
            layers.append(DenseLayer(channels, growth))
            channels += growth
        if block < 2:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers), torch.randn(8, 3, 32, 32)


class InceptionBlock(nn.Module):
    """Four branches of unlike depth, joined (Szegedy et al., arXiv 1409.4842)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()

        def conv(into: int, out: int, size: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(into, out, size, padding=size // 2), nn.BatchNorm2d(out), nn.ReLU())

        self.branches = nn.ModuleList(
            [
                conv(channels, width, 1),
                nn.Sequential(conv(channels, width, 1), conv(width, width, 3)),
                nn.Sequential(conv(channels, width // 2, 1), conv(width // 2, width, 3), conv(width, width, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, width, 1)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


@model
def inception() -> tuple[nn.Module, Sample]:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for index in range(6):
        layers.append(InceptionBlock(64 if index == 0 else 128, 32))
        if index in (1, 3):
            layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(8, 3, 32, 32)


class Fourier(nn.Module):
    """One layer of a Fourier neural operator (Li et al., arXiv 2010.08895)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, 2) / width)
        self.skip = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        mixed = torch.zeros_like(spectrum)
        corner = spectrum[:, :, : self.modes, : self.modes]
        mixed[:, :, : self.modes, : self.modes] = torch.einsum(
            "bixy,ioxy->boxy", corner, torch.view_as_complex(self.weight)
        )
        return nn.functional.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + self.skip(x))


@model
def fno() -> tuple[nn.Module, Sample]:
    net = nn.Sequential(
        nn.Conv2d(1, 32, 1), *(Fourier(32, 12) for _ in range(6)), nn.Conv2d(32, 64, 1), nn.GELU(), nn.Conv2d(64, 1, 1)
    )
    return net, torch.randn(4, 1, 64, 64)


@model
def perceptron() -> tuple[nn.Module, Sample]:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(512, 256)


@model
def convolutions() -> tuple[nn.Module, Sample]:
    layers: list[nn.Module] = []
    for width, wider in ((3, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(8, 3, 48, 48)


@model
def gpt2_one_layer() -> tuple[nn.Module, Sample]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=256, n_layer=1, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config), _text()
