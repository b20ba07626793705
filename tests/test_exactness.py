"""Audits find nothing where nothing is wrong, and leave everything as it was."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplan
from tests.support.architectures import ARCHITECTURES
from tests.support.audited import Block, checkpointed, net, plainly, sample
from tests.support.models_of_2026 import MODELS_OF_2026, repeated
from tests.support.zoo import MODELS


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}], ids=["hooks", "reentrant"])
def test_checkpoints_that_are_right(options: dict[str, Any]) -> None:
    model = net(checkpointed(**options))
    before = torch.get_rng_state()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    audit = memplan.audit(model, sample())
    assert audit.exact
    assert audit.switched_off == ("1 checkpoint",)
    assert audit.compared["gradient"] == 13
    assert str(audit).startswith("exact: 1 output")
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in model.parameters())


def test_a_model_without_anything() -> None:
    audit = memplan.audit(net(plainly), sample())
    assert audit.exact
    assert "with nothing switched off" in str(audit)


def test_saving_on_the_cpu() -> None:
    def saved(block: Block, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(block.body, x, use_reentrant=False)  # type: ignore[no-any-return]

    audit = memplan.audit(net(saved), sample())
    assert audit.exact
    assert audit.switched_off == ("1 checkpoint", "1 context of saved-tensor hooks")


def test_a_selective_checkpoint() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    contexts = create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])
    assert memplan.audit(net(checkpointed(context_fn=lambda: contexts)), sample()).exact


def test_compiled_code_of_the_same_kernels() -> None:
    model = torch.compile(net(plainly), backend="eager")
    audit = memplan.audit(model, sample())  # type: ignore[arg-type]
    assert audit.exact
    assert audit.switched_off == ("1 compiled call",)


@pytest.mark.slow
def test_compiled_code_in_a_new_process() -> None:
    """Dynamo imports its parts in the middle of the audited step, which must not undo what these imports do."""
    script = """
import torch, memplan
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
print(memplan.audit(torch.compile(model, backend="aot_eager"), torch.randn(4, 8)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("exact: "), done.stdout + done.stderr


def test_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(20, 16), Block(checkpointed()), nn.Linear(16, 20)
            self.head.weight = self.embed.weight
            self.head.bias.requires_grad_(False)

        def forward(self, ids: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
            hidden = self.block(self.embed(ids)) * scale
            return {"logits": self.head(hidden), "best": hidden.argmax(-1), "pair": (hidden, None, 3)}

    torch.manual_seed(0)
    audit = memplan.audit(Tied(), {"ids": torch.randint(20, (4, 6)), "scale": 0.5})
    assert audit.exact, str(audit)
    assert audit.compared["output"] == 4
    assert audit.compared["gradient"] == 5


def test_a_planned_model() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    model = net(plainly)
    memplan.apply(model, sample(), "min", loss_fn=loss, costs="estimate")
    audit = memplan.audit(model, sample())
    assert audit.exact, str(audit)
    assert audit.switched_off == ("1 plan of memplan",)
    memplan.apply(model, None, "min", loss_fn=loss, costs="estimate")  # the audit is the first call
    assert memplan.audit(model, sample()).exact
    assert memplan.plan_of(model) is not None
    optimizer = torch.optim.SGD(model.parameters())
    memplan.apply(model, sample(), "1GiB", optimizer=optimizer, update="backward", costs="estimate")
    with pytest.raises(ValueError, match="leaves no gradients"):
        memplan.audit(model, sample())
    memplan.remove(model)


def checkpoint_all(model: nn.Module, **options: Any) -> None:
    """Switch gradient checkpointing on, by the method that the library has for it."""
    for module in model.modules():
        if hasattr(module, "enable_gradient_checkpointing"):  # of diffusers
            module.enable_gradient_checkpointing()
            return
    for module in model.modules():
        if getattr(module, "supports_gradient_checkpointing", False):
            module.gradient_checkpointing_enable(options)  # type: ignore[operator]
            return


QUICK = ("gpt2", "bert", "dit")
WITHOUT_CHECKPOINTS = ("convnext", "rt_detr")  # transformers has none for them


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in ARCHITECTURES]
)
@pytest.mark.filterwarnings("ignore")  # of libraries, about their own defaults
def test_architectures_under_gradient_checkpointing(name: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    model, batch = ARCHITECTURES[name].build(0)
    checkpoint_all(model, use_reentrant=False)
    audit = memplan.audit(model, batch)
    assert audit.exact, str(audit)
    assert any("checkpoint" in text for text in audit.switched_off) or name in WITHOUT_CHECKPOINTS
    if getattr(model, "supports_gradient_checkpointing", False):
        before = torch.get_rng_state()
        model(**batch)
        draws = not torch.equal(before, torch.get_rng_state())
        checkpoint_all(model, use_reentrant=False, preserve_rng_state=False)
        assert memplan.audit(model, batch).exact is not draws


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS_OF_2026 if name != "pi0"])
@pytest.mark.filterwarnings("ignore")
def test_models_of_2026_under_gradient_checkpointing(name: str) -> None:
    """Of models in parts, the first part that supports it: of sam3 the text encoder, of rf_detr the backbone."""
    model, batch = MODELS_OF_2026[name].build(0)
    checkpoint_all(model, use_reentrant=False)
    with repeated(name):
        audit = memplan.audit(model, batch)
    assert audit.exact, str(audit)
    assert any("checkpoint" in text for text in audit.switched_off) is (name not in WITHOUT_CHECKPOINTS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_fails_under_gradient_checkpointing() -> None:
    """PI0 of transformers switches caches off with checkpoints, and then reads a length of its cache."""
    model, batch = MODELS_OF_2026["pi0"].build(0)
    checkpoint_all(model, use_reentrant=False)
    for step in (lambda: model(**batch), lambda: memplan.audit(model, batch)):
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'get_seq_length'"):
            step()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_llama_with_dropout(reentrant: bool) -> None:
    pytest.importorskip("transformers")
    model, batch = MODELS["llama_eager"](0)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    checkpoint_all(model, use_reentrant=reentrant)
    assert memplan.audit(model, batch).exact
    checkpoint_all(model, use_reentrant=reentrant, preserve_rng_state=False)
    audit = memplan.audit(model, batch)
    assert audit.findings[0].kind == "second run"
    assert audit.findings[0].name.startswith("model.layers.1.self_attn")


def test_an_optimizer_that_steps_in_backward() -> None:
    model = net(checkpointed())
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(sample()).sum().backward()
    before = {p: {k: v.clone() for k, v in of.state[p].items()} for p, of in optimizers.items()}
    audit = memplan.audit(model, sample())
    assert audit.exact, str(audit)
    assert audit.compared["parameter"] == 12
    assert all(torch.equal(v, optimizers[p].state[p][k]) for p, state in before.items() for k, v in state.items())


def test_a_device_that_does_not_repeat_itself() -> None:
    turns = itertools.count()

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * (1 + 1e-3 * (next(turns) % 7))

    def noisy(block: Block, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: block.body(Noisy.apply(x)), x, use_reentrant=False)  # type: ignore[no-any-return]

    audit = memplan.audit(net(noisy), sample())
    assert audit.findings == ()
    assert not audit.exact
    assert {one.name for one in audit.nondeterministic} >= {"0.linear.weight"}
    assert "no fault found" in str(audit)
    model = net(noisy)
    model[0]._around = checkpointed(preserve_rng_state=False)  # type: ignore[union-attr]
    faulty = memplan.audit(model, sample())
    assert {one.name for one in faulty.findings} >= {"0.drop", "0.linear.weight"}
