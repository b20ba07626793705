"""Small models of many families, with random weights, and how to compare two runs of them bit for bit.

`MODELS[name](seed)` gives a model in train mode and a sample: keyword arguments (a dict), positional arguments (a
tuple) or one tensor, whatever the model's natural call is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

Sample = dict[str, Any] | tuple[Any, ...] | torch.Tensor
MODELS: dict[str, Callable[[int], tuple[nn.Module, Sample]]] = {}

Build = Callable[[], tuple[nn.Module, Sample]]


def model(build: Build) -> Build:
    """Enter a model into `MODELS`, built after seeding the generator."""

    def seeded(seed: int) -> tuple[nn.Module, Sample]:
        torch.manual_seed(seed)
        net, sample = build()
        return net.train(), sample

    MODELS[build.__name__] = seeded
    return build


def _token_ids(*shape: int, vocabulary: int = 100) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape)


def _language_sample(batch: int = 2, length: int = 64) -> Sample:
    ids = _token_ids(batch, length)
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


@model
def gpt2() -> tuple[nn.Module, Sample]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config), _language_sample()


def _llama(attention: str) -> tuple[nn.Module, Sample]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config), _language_sample()


@model
def llama() -> tuple[nn.Module, Sample]:
    return _llama("sdpa")


@model
def llama_eager() -> tuple[nn.Module, Sample]:
    return _llama("eager")


@model
def bert() -> tuple[nn.Module, Sample]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return BertForMaskedLM(config), {"input_ids": _token_ids(2, 64), "labels": _token_ids(2, 64)}


@model
def t5() -> tuple[nn.Module, Sample]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=100,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    sample = {"input_ids": _token_ids(2, 48), "labels": _token_ids(2, 32), "use_cache": False}
    return T5ForConditionalGeneration(config), sample


@model
def vit() -> tuple[nn.Module, Sample]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    sample = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": _token_ids(2, vocabulary=2)}
    return ViTForImageClassification(config), sample


def _resnet(depths: list[int]) -> tuple[nn.Module, Sample]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=depths, layer_type="bottleneck")
    sample = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": _token_ids(2, vocabulary=2)}
    return ResNetForImageClassification(config), sample


@model
def resnet() -> tuple[nn.Module, Sample]:
    """Each kind of block once."""
    return _resnet([1, 1, 1, 1])


@model
def resnet50() -> tuple[nn.Module, Sample]:
    """True depth and block type, a sixteenth of the width, small images."""
    return _resnet([3, 4, 6, 3])


@model
def unet() -> tuple[nn.Module, Sample]:
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        dropout=0.1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return net, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 5])}


@model
def transformer() -> tuple[nn.Module, Sample]:
    net = nn.Transformer(64, 4, 2, 2, 128, 0.1, batch_first=True)
    return net, (torch.randn(2, 32, 64), torch.randn(2, 24, 64))


class Handmade(nn.Module):
    """What the families above lack: shared layers, several outputs, a long skip, twin dropouts, in-place writes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop_left = nn.Dropout(0.3)
        self.drop_right = nn.Dropout(0.3)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.norm(self.shared(x)).relu_()
        mixed = self.drop_left(hidden) + self.drop_right(hidden)  # two masks, never one
        mixed.add_(self.shared(hidden))
        mixed[:, :8].mul_(2.0)
        wide = self.inner(mixed).relu_()
        deep = self.outer(wide)
        deep += x  # the skip over the whole depth
        logits = self.head(deep)
        return {"logits": logits, "features": (deep, mixed.mean(0)), "best": logits.detach().argmax(-1)}


@model
def handmade() -> tuple[nn.Module, Sample]:
    return Handmade(), torch.randn(48, 32)


def call(net: nn.Module, sample: Sample) -> Any:
    """The model's natural call on its sample."""
    if isinstance(sample, dict):
        return net(**sample)
    return net(*sample) if isinstance(sample, tuple) else net(sample)


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and model outputs (which are dicts), in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_of(item)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_of(item)


def loss_of(output: Any) -> torch.Tensor:
    """The output's own loss where it has one, else the sum of squares of all that is floating in it."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    floating = [t for t in tensors_of(output) if t.is_floating_point()]
    return torch.stack([t.float().pow(2).sum() for t in floating]).sum()


def copied(tree: Any) -> Any:
    """The same containers with tensors that keep shape, strides and bits but share no memory with the originals."""
    if isinstance(tree, torch.Tensor):
        t = tree.detach()
        storage = t.untyped_storage().clone()
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, t.storage_offset(), t.shape, t.stride())
    if isinstance(tree, Mapping):
        if not dataclasses.is_dataclass(tree):
            return type(tree)({key: copied(item) for key, item in tree.items()})
        return type(tree)(**{key: copied(item) for key, item in tree.items()})
    if isinstance(tree, (tuple, list)):
        return type(tree)(copied(item) for item in tree)
    return tree


def run_steps(
    net: nn.Module, sample: Sample, steps: int = 2, autocast: bool = False, lr: float = 1e-3, seed: int = 7
) -> dict[str, Any]:
    """Train with SGD and return everything that must be the same with and without a plan.

    Per step the output, the loss and the gradients; at the end parameters, buffers and the generator's state.
    autocast: run the model under bfloat16 autocast; the loss is taken outside of it.
    """
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    outputs, losses, grads = [], [], []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = call(net, sample)
        loss = loss_of(output)
        outputs.append(copied(output))
        losses.append(copied(loss))
        loss.backward()
        grads.append({name: copied(p.grad) for name, p in net.named_parameters()})
        optimizer.step()
    return {
        "outputs": outputs,
        "losses": losses,
        "grads": grads,
        "params": {name: copied(p) for name, p in net.named_parameters()},
        "buffers": {name: copied(b) for name, b in net.named_buffers()},
        "rng_state": torch.get_rng_state(),
    }


def assert_same_bits(a: Any, b: Any, name: str = "result") -> None:
    """Fail at the first difference between two nested results, naming where it is. NaN equals the same NaN."""
    difference = first_difference(a, b, name)
    assert difference is None, difference


def first_difference(a: Any, b: Any, name: str) -> str | None:
    """What differs first between `a` and `b`, or None."""
    if type(a) is not type(b):
        return f"{name}: type {type(a).__name__} against {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        return _tensor_difference(a, b, name)
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return f"{name}: keys {list(a)} against {list(b)}"
        pairs = [(f"{name}.{key}", a[key], b[key]) for key in a]
    elif isinstance(a, (tuple, list)):
        if len(a) != len(b):
            return f"{name}: length {len(a)} against {len(b)}"
        pairs = [(f"{name}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b))]
    else:
        return None if a == b or (a != a and b != b) else f"{name}: {a!r} against {b!r}"
    found = (first_difference(x, y, where) for where, x, y in pairs)
    return next((difference for difference in found if difference is not None), None)


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, name: str) -> str | None:
    for trait in ("dtype", "shape", "device", "layout"):
        if getattr(a, trait) != getattr(b, trait):
            return f"{name}: {trait} {getattr(a, trait)} against {getattr(b, trait)}"
    if a.stride() != b.stride():
        return f"{name}: strides {a.stride()} against {b.stride()}"
    different = bits_of(a) != bits_of(b)
    count = int(different.sum())
    if not count:
        return None
    index = tuple(int(i) for i in different.nonzero()[0])[: a.dim()]
    return f"{name}: {count} of {a.numel()} elements differ, first at {index}: {a[index]} against {b[index]}"


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers of its elements' width, so that -0.0 differs from 0.0 and NaN from another NaN."""
    plain = tensor.detach().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if not plain.is_floating_point():
        return plain
    return plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()])
