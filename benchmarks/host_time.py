"""What Python and PyTorch's dispatch take of a step: steps of tiny kernels, plain and planned, in one run.

    python -m benchmarks.host_time              # on a CPU, by the process's own seconds
    python -m benchmarks.host_time --device cuda

A GPU waits for the host where its kernels are shorter than this. One thread; the quartile of 40 steps for each row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import memplan
from benchmarks.environment import environment, own_cache

Built = tuple[nn.Module, dict[str, Any]]


def _language_model(net: nn.Module, device: str) -> Built:
    ids = torch.randint(0, 64, (1, 8), device=device)
    return net.to(device).train(), {"input_ids": ids, "labels": ids, "use_cache": False}


def gpt2(device: str) -> Built:
    """GPT-2 small's 12 layers, narrow."""
    config = GPT2Config(n_embd=32, n_layer=12, n_head=2, vocab_size=64, n_positions=16)
    return _language_model(GPT2LMHeadModel(config), device)


def llama(device: str) -> Built:
    """A Llama of 32 narrow layers."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=32, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    return _language_model(LlamaForCausalLM(config), device)


def resnet(device: str) -> Built:
    """A ResNet-50 of few channels."""
    config = ResNetConfig(embedding_size=4, hidden_sizes=[8, 8, 8, 8], depths=[3, 4, 6, 3], num_labels=4)
    labels = torch.zeros(2, dtype=torch.long, device=device)
    return ResNetForImageClassification(config).to(device).train(), {
        "pixel_values": torch.randn(2, 3, 32, 32, device=device), "labels": labels,
    }  # fmt: skip


MODELS: dict[str, Callable[[str], Built]] = {"gpt2": gpt2, "llama": llama, "resnet": resnet}


def host_ms(net: nn.Module, sample: dict[str, Any], steps: int = 40) -> tuple[float, float]:
    """Milliseconds of forward and of backward."""
    forward, backward = [], []
    for _ in range(steps):
        start = time.process_time()
        loss = net(**sample)["loss"]
        middle = time.process_time()
        loss.backward()
        forward.append(1e3 * (middle - start))
        backward.append(1e3 * (time.process_time() - middle))
        net.zero_grad()
    return sorted(forward)[steps // 4], sorted(backward)[steps // 4]


def show(name: str, what: str, times_ms: tuple[float, float], runs: int) -> None:
    forward, backward = times_ms
    each = 1e3 * (forward + backward) / runs
    print(f"{name:8s}  {what:8s}  {forward:7.2f}  {backward:8.2f}  {runs:4d}  {each:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(environment())
    print(f"{'':8s}  {'':8s}  forward  backward   ops  us an op")
    for name in given.models:
        torch.manual_seed(0)
        net, sample = MODELS[name](given.device)
        times = host_ms(net, sample)
        points = memplan.explore(net, sample, costs="estimate")
        ops = len(points[-1].problem.graph.ops)
        show(name, "plain", times, ops)
        for what, plan in (("planned", points[-1]), ("floor", points[0])):
            memplan.apply(net, sample, plan=plan)
            show("", what, host_ms(net, sample), ops + len(plan.recomputed))
            memplan.remove(net)


if __name__ == "__main__":
    with own_cache():
        main()
