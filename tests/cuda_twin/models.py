"""Models of the sizes that people train, on the device, whose parameters hold nothing.

`MODELS[name]()` gives a model in train mode and a sample, keyword arguments that make it return its loss.
Those of transformers are in bfloat16, convolutions in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]


def on_device(make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Make a model where kernels do nothing, so that even eight billion parameters take no time."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return make().train()
    finally:
        torch.set_default_dtype(before)


def tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="cuda")


def text(batch: int, length: int) -> dict[str, Any]:
    ids = tokens(batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2(batch: int = 8, length: int = 512, **sizes: Any) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return on_device(lambda: GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))), text(batch, length)


def llama(layers: int = 4, batch: int = 8, length: int = 512, **sizes: Any) -> Built:
    """Llama-3-8B has 32 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    of_8b = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **{**of_8b, "vocab_size": 128256, **sizes})
    return on_device(lambda: LlamaForCausalLM(config)), text(batch, length)


def small_llama(layers: int = 4, batch: int = 8, length: int = 512) -> Built:
    return llama(
        layers, batch, length, hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=2000,
    )  # fmt: skip


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    return on_device(lambda: BertForMaskedLM(BertConfig())), text(16, 512)


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False, decoder_start_token_id=0)
    return on_device(lambda: T5ForConditionalGeneration(config)), text(8, 512)


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    model = on_device(lambda: ViTForImageClassification(ViTConfig()))
    images = torch.empty(64, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    return model, {"pixel_values": images, "labels": torch.zeros(64, dtype=torch.long, device="cuda")}


def convolved(i: int, o: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))


class Classifier(nn.Module):
    """A net, and the loss of what it gives: of each picture, or of each of its points."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


class Bottleneck(nn.Module):
    def __init__(self, i: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            convolved(i, width, 1), convolved(width, width, 3, stride),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        beside = nn.Sequential(nn.Conv2d(i, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        self.beside = nn.Identity() if i == 4 * width else beside

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.beside(x), inplace=True)


def head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [convolved(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for at in range(count):
            layers.append(Bottleneck(i, width, stride if at == 0 else 1))
            i = 4 * width
    return nn.Sequential(*layers, *head(i))


class DenseLayer(nn.Module):
    def __init__(self, i: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(i), nn.ReLU(), nn.Conv2d(i, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )  # fmt: skip

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [*xs, self.layers(torch.cat(xs, 1))]


class DenseBlock(nn.Module):
    def __init__(self, i: int, count: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(i + at * growth, growth) for at in range(count))

    def forward(self, x: Tensor) -> Tensor:
        xs = [x]
        for layer in self.layers:
            xs = layer(xs)
        return torch.cat(xs, 1)


def densenet121(growth: int = 32) -> nn.Module:
    layers: list[nn.Module] = [convolved(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for count in (6, 12, 24, 16):
        layers += [DenseBlock(i, count, growth), nn.BatchNorm2d(i := i + count * growth), nn.ReLU()]
        if count != 16:
            layers += [nn.Conv2d(i, i := i // 2, 1, bias=False), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, *head(i))


class UNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width << at for at in range(5)]
        self.down = nn.ModuleList(
            nn.Sequential(convolved(i, o), convolved(o, o)) for i, o in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, i // 2, 2, 2) for i in widths[:0:-1])
        self.joined = nn.ModuleList(
            nn.Sequential(convolved(i, i // 2), convolved(i // 2, i // 2)) for i in widths[:0:-1]
        )
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for at, layers in enumerate(self.down):
            kept.append(x := layers(F.max_pool2d(x, 2) if at else x))
        kept.pop()
        for up, layers in zip(self.up, self.joined, strict=True):
            x = layers(torch.cat((kept.pop(), up(x)), 1))
        return self.last(x)


def pictures(make: Callable[[], nn.Module], batch: int, size: int, labels: tuple[int, ...]) -> Callable[[], Built]:
    def build() -> Built:
        model = on_device(lambda: Classifier(make()), torch.float32)
        images = torch.empty(batch, 3, size, size, device="cuda")
        return model, {"x": images, "y": torch.zeros(batch, *labels, dtype=torch.long, device="cuda")}

    return build


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "resnet": pictures(resnet50, 64, 224, ()),
    "densenet": pictures(densenet121, 64, 224, ()),
    "unet": pictures(UNet, 8, 256, (256, 256)),
}


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returned."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def train(
    model: nn.Module, sample: dict[str, Any], optimizer: torch.optim.Optimizer | None = None, steps: int = 1
) -> None:
    """Steps on one batch. As plans count on, outputs are held until the model is called again."""
    output = None
    for _ in range(steps):
        output = None
        output = model(**sample)
        loss_of(output).backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
