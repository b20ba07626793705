"""Models and batches on a CUDA device, or on the CPU where there is none, with random weights and data.

`CASES[name]()` gives a model in train mode on the device and a batch: keyword arguments that make it return its loss.
Models of transformers are in bfloat16, pictures in float32 under bfloat16 autocast where the name says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Batch = dict[str, Any]
Built = tuple[nn.Module, Batch]


def _on_device(make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return make().train()
    finally:
        torch.set_default_dtype(before)


def _text(vocabulary: int, batch: int, length: int) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, length), device=DEVICE)
    return {"input_ids": ids, "labels": ids.clone()}


def llama(layers: int, batch: int, length: int, vocabulary: int = 128256, lora: bool = False, **sizes: int) -> Built:
    """Llama-3.1-8B has 32 layers, these widths and this vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    widths = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=vocabulary, use_cache=False, **{**widths, **sizes})
    model = _on_device(lambda: LlamaForCausalLM(config))
    if lora:
        import peft

        adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False).train()  # type: ignore[assignment]
    return model, _text(vocabulary, batch, length)


def llama2_7b(batch: int, length: int, layers: int = 32) -> Built:
    return llama(layers, batch, length, 32000, intermediate_size=11008, num_key_value_heads=32)


def gpt2(batch: int, length: int, **sizes: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = _on_device(lambda: GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes)))
    return model, _text(50257, batch, length)


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    return _on_device(lambda: BertForMaskedLM(BertConfig())), _text(30522, 16, 512)


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False, decoder_start_token_id=0)
    return _on_device(lambda: T5ForConditionalGeneration(config)), _text(32128, 8, 512)


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    model = _on_device(lambda: ViTForImageClassification(ViTConfig(num_labels=1000)))
    images = torch.randn(64, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16)
    return model, {"pixel_values": images, "labels": torch.randint(0, 1000, (64,), device=DEVICE)}


class Classifier(nn.Module):
    """A net and the loss of what it gives: of each picture, or of each of its points."""

    def __init__(self, net: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.net, self.autocast = net, autocast

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(self.net(x), y)


def pictures(make: Callable[[], nn.Module], batch: int, size: int, each_point: bool = False) -> Built:
    model = _on_device(lambda: Classifier(make(), autocast=True), torch.float32)
    shape = (batch, size, size) if each_point else (batch,)
    labels = torch.randint(0, 2 if each_point else 1000, shape, device=DEVICE)
    return model, {"x": torch.randn(batch, 3, size, size, device=DEVICE), "y": labels}


def vision(name: str, batch: int, size: int = 224) -> Built:
    import torchvision

    return pictures(lambda: torchvision.models.get_model(name), batch, size)


def mixer(batch: int) -> Built:
    import timm

    return pictures(lambda: timm.create_model("mixer_b16_224"), batch, 224)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with batch norm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width << at for at in range(5)]
        self.down = nn.ModuleList(map(self._double, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, i // 2, 2, 2) for i in widths[:0:-1])
        self.join = nn.ModuleList(self._double(i, i // 2) for i in widths[:0:-1])
        self.last = nn.Conv2d(width, 2, 1)

    def _double(self, i: int, o: int) -> nn.Module:
        def one(i: int) -> list[nn.Module]:
            return [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]

        return nn.Sequential(*one(i), *one(o))

    def forward(self, x: Tensor) -> Tensor:
        handed: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            handed.append(x)
        handed.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((handed.pop(), up(x)), 1))
        return self.last(x)


class _Spectral(nn.Module):
    """A product with complex weights over the lowest frequencies (Li et al. 2021, equation 4)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width**2)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft2(x)
        m, weights = self.modes, torch.view_as_complex(self.weights)
        out = torch.zeros_like(found)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], weights[0])
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], weights[1])
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FNO(nn.Module):
    """Fourier neural operator in two dimensions (Li et al. 2021)."""

    def __init__(self, width: int = 32, modes: int = 12, layers: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 1), nn.Conv2d(width, 1, 1)
        self.spectral = nn.ModuleList(_Spectral(width, modes) for _ in range(layers))
        self.beside = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for spectral, beside in zip(self.spectral, self.beside, strict=True):
            x = F.gelu(spectral(x) + beside(x))
        return F.mse_loss(self.last(x), y)


def fno(batch: int = 16, size: int = 256) -> Built:
    model = _on_device(FNO, torch.float32)
    x = torch.randn(batch, 3, size, size, device=DEVICE)
    return model, {"x": x, "y": torch.randn(batch, 1, size, size, device=DEVICE)}


def tiny() -> Built:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    return llama(3, 2, 32, 128, **sizes)


CASES: dict[str, Callable[[], Built]] = {
    "tiny": tiny,
    "lora-8b-1x2048": lambda: llama(32, 1, 2048, lora=True),
    "lora-8b-4x2048": lambda: llama(32, 4, 2048, lora=True),
    "full-8b-4x512": lambda: llama(32, 4, 512),
    "full-7b-4x512": lambda: llama2_7b(4, 512),
    "full-7b-8-layers-4x512": lambda: llama2_7b(4, 512, 8),
    "llama-8-layers-4x1024": lambda: llama(8, 4, 1024, 32000),
    "llama-2-layers-2x512": lambda: llama(2, 2, 512),
    "gpt2-1x128": lambda: gpt2(1, 128),
    "gpt2-8x512": lambda: gpt2(8, 512),
    "gpt2-medium-8x1024": lambda: gpt2(8, 1024, n_layer=24, n_embd=1024, n_head=16),
    "gpt2-large-4x1024": lambda: gpt2(4, 1024, n_layer=36, n_embd=1280, n_head=20),
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet50": lambda: vision("resnet50", 64),
    "resnet101": lambda: vision("resnet101", 128),
    "regnet": lambda: vision("regnet_y_8gf", 64),
    "densenet121": lambda: vision("densenet121", 64),
    "unet": lambda: pictures(UNet, 16, 256, each_point=True),
    "mixer": lambda: mixer(64),
    "fno": fno,
}
