"""The audit finds faults that are planted in checkpoints, hooks and compiled code, and none where there are none."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memplan
from memplan import torch_private as private
from tests.support.architectures import ARCHITECTURES
from tests.support.zoo import MODELS

EXACT: dict[str, Any] = {"use_reentrant": False}
Run = Callable[..., Any]


class Block(nn.Module):
    """A layer with a dropout, which `around` runs."""

    def __init__(self, around: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.4)
        self.norm: nn.Module = nn.LayerNorm(16)
        self._around = around

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.drop(torch.tanh(self.linear(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._around(self, x)


def plainly(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.body(x)


def checkpointed(**options: Any) -> Callable[[Block, torch.Tensor], torch.Tensor]:
    return lambda block, x: checkpoint(block.body, x, **(EXACT | options))


def net(around: Callable[[Block, torch.Tensor], torch.Tensor], kind: type[Block] = Block) -> nn.Module:
    """Three blocks. The one in the middle is what the tests are about."""
    torch.manual_seed(0)
    return nn.Sequential(Block(plainly), kind(around), Block(plainly)).train()


def sample() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)


def found_in(audit: memplan.Audit, kind: str) -> list[str]:
    return [one.name for one in audit.findings if one.kind == kind]


def first_of(model: nn.Module, **given: Any) -> tuple[str, str]:
    """Kind and name of what differs first."""
    audit = memplan.audit(model, sample(), **given)
    assert not audit.exact
    assert not audit.nondeterministic
    assert str(audit).startswith("not exact: ")
    return audit.findings[0].kind, audit.findings[0].name


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_stale_generator() -> None:
    audit = memplan.audit(net(checkpointed(preserve_rng_state=False)), sample())
    assert (audit.findings[0].kind, audit.findings[0].name) == ("second run", "1.drop")
    assert found_in(audit, "gradient")[0] == "1.norm.weight"  # those of block 2 are right
    assert found_in(audit, "generator") == ["torch"]
    assert found_in(audit, "output") == []
    assert audit.switched_off == ("1 checkpoint",)


@pytest.mark.parametrize("reentrant", [False, True])
def test_statistics_counted_twice(reentrant: bool) -> None:
    model = net(checkpointed(use_reentrant=reentrant))
    model[1].norm = nn.BatchNorm1d(16)  # type: ignore[union-attr]
    audit = memplan.audit(model, sample())
    names = ["running_mean", "running_var", "num_batches_tracked"]
    assert [(one.kind, one.name, one.module) for one in audit.findings] == [
        ("buffer", f"1.norm.{name}", "1.norm") for name in names
    ]
    assert audit.findings[2].largest == 1


class ByHand(torch.autograd.Function):
    """A checkpoint as people write it: without generator, without autocast."""

    @staticmethod
    def forward(ctx: Any, run: Run, x: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        torch.autograd.backward(output, gradient.to(output.dtype))
        return None, x.grad


def by_hand(block: Block, x: torch.Tensor) -> torch.Tensor:
    return ByHand.apply(block.body, x)  # type: ignore[no-any-return, no-untyped-call]


def test_autocast_lost_in_the_second_run() -> None:
    model = net(by_hand)
    model[1].drop = nn.Identity()  # type: ignore[union-attr]
    assert memplan.audit(model, sample(), reference=model_with(net(plainly), nn.Identity())).exact
    with torch.autocast("cpu", torch.bfloat16):
        audit = memplan.audit(model, sample(), reference=model_with(net(plainly), nn.Identity()))
        unseen = memplan.audit(model, sample())
    assert (audit.findings[0].kind, audit.findings[0].name) == ("second run", "1.linear")
    assert audit.findings[1].relative < 0.1
    assert unseen.exact
    assert "1.linear runs again in backward" in unseen.unknown
    assert "output" not in {one.kind for one in audit.findings}


def model_with(model: nn.Module, drop: nn.Module) -> nn.Module:
    model[1].drop = drop  # type: ignore[operator, union-attr]
    return model


def test_a_detached_output() -> None:
    def detached(block: Block, x: torch.Tensor) -> torch.Tensor:
        class Detaching(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.mark_non_differentiable(result := block.body(x).detach())
                return result

        return Detaching.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    audit = memplan.audit(net(detached), sample(), reference=net(plainly))
    assert (audit.findings[0].kind, audit.findings[0].name) == ("gradient", "1.norm.weight")
    assert audit.findings[0].note == "is missing as it is"
    assert "input sample" in found_in(audit, "gradient")


def test_an_output_without_gradient() -> None:
    model = net(plainly)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()  # type: ignore[no-any-return]

    def detached(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum().detach()  # type: ignore[no-any-return]

    audit = memplan.audit(model, sample(), detached, reference=loss)
    assert audit.findings[0].kind == "output"
    assert "requires no grad" in str(audit.findings[0])


def test_a_mutated_input() -> None:
    class Mutating(Block):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x.data.mul_(0.5)
            return super().body(x)

    assert first_of(net(checkpointed(), Mutating)) == ("second run", "1.linear")


def test_a_mutated_sample() -> None:
    class Mutating(Block):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            x.data.mul_(0.5)
            return x * self.linear.weight[0]

    torch.manual_seed(0)
    x = sample()
    before = x.detach().clone()
    audit = memplan.audit(nn.Sequential(Mutating(checkpointed()), Block(plainly)), x)
    assert found_in(audit, "input") == ["sample"]
    assert torch.equal(x, before)


def test_a_counter() -> None:
    class Counting(Block):
        calls = 0

        def body(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().body(x) if self.calls % 2 else super().body(x * 2)

    model = net(checkpointed(), Counting)
    assert first_of(model) == ("second run", "1.linear")
    assert model[1].calls == 0  # type: ignore[union-attr]


def test_a_layer_left_out_by_chance() -> None:
    class Chancy(Block):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x * random.random())

    random.seed(0)
    before = random.getstate()
    audit = memplan.audit(net(checkpointed(), Chancy), sample())
    assert (audit.findings[0].kind, audit.findings[0].name) == ("second run", "1.linear")
    assert "random" in found_in(audit, "generator")
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("saves_as_much", "found"), [(True, ("second run", "1.linear")), (False, ("error", "CheckpointError"))]
)
def test_another_mode_before_backward(saves_as_much: bool, found: tuple[str, str]) -> None:
    class Moody(Block):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x * (2 if self.training else 1))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result = model.train()(x).square().mean()
        model.eval()
        return result  # type: ignore[no-any-return]

    model = net(checkpointed(), Moody)
    if saves_as_much:
        model[1].drop = nn.Identity()  # type: ignore[union-attr]
    assert first_of(model, loss_fn=loss) == found
    assert model.training


@contextlib.contextmanager
def rounding() -> Iterator[None]:
    with saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()):
        yield


def test_hooks_that_round() -> None:
    def packed(block: Block, x: torch.Tensor) -> torch.Tensor:
        with rounding():
            return block.body(x)

    audit = memplan.audit(net(packed), sample())
    assert (audit.findings[0].kind, audit.findings[0].name) == ("gradient", "1.norm.weight")
    assert audit.findings[0].relative < 0.02
    assert audit.switched_off == ("1 context of saved-tensor hooks",)
    with rounding():
        assert first_of(net(plainly)) == ("gradient", "2.norm.weight")


def test_pinned_memory_without_strides() -> None:
    """PyTorch packs a weight that linear saves transposed without its strides, and another kernel takes it then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        audit = memplan.audit(model, torch.randn(4, 8))
    assert found_in(audit, "gradient") == ["0.bias", "0.weight"]
    assert all(one.relative < 1e-6 for one in audit.findings)


def test_hooks_that_use_a_buffer_again() -> None:
    class Reusing(Block):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            places: dict[torch.Size, torch.Tensor] = {}  # the third tensor of a size takes the place of the first

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                return places.setdefault(tensor.shape, torch.empty_like(tensor)).copy_(tensor)

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                return super().body(x)

    assert first_of(net(plainly, Reusing)) == ("gradient", "1.norm.weight")


def test_a_gradient_that_is_added_twice() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, block: Block, x: torch.Tensor) -> torch.Tensor:
            ctx.block = block
            ctx.save_for_backward(x)
            return x * block.linear.weight[0]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                again = x.detach().requires_grad_() * ctx.block.linear.weight[0]
            for _ in range(2):
                again.backward(gradient, retain_graph=True)
            return None, gradient * ctx.block.linear.weight[0]

    def by_hand(block: Block, x: torch.Tensor) -> torch.Tensor:
        return Twice.apply(block, x)  # type: ignore[no-any-return, no-untyped-call]

    model, right = net(by_hand), net(lambda block, x: x * block.linear.weight[0])
    assert first_of(model, reference=right) == ("gradient", "1.linear.weight")
    audit = memplan.audit(model, sample(), reference=right)
    assert found_in(audit, "gradient") == ["1.linear.weight"]
    assert audit.findings[0].relative == 1
    unseen = memplan.audit(model, sample())
    assert unseen.unknown == (f"{Twice.__qualname__} takes a function",)
    assert "not switched off: " in str(unseen)


def test_a_parameter_that_is_updated_before_the_second_run() -> None:
    model = net(checkpointed())
    optimizer = torch.optim.SGD([model[1].linear.bias], lr=0.5, momentum=0.9)  # type: ignore[union-attr]

    def step(parameter: torch.Tensor) -> None:
        optimizer.step()

    def double(parameter: torch.Tensor) -> None:
        model[1].linear.weight.data.mul_(2)  # type: ignore[union-attr]

    model[2].norm.weight.register_post_accumulate_grad_hook(double)  # type: ignore[union-attr]
    model[1].linear.bias.register_post_accumulate_grad_hook(step)  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    audit = memplan.audit(model, sample())
    assert (audit.findings[0].kind, audit.findings[0].name) == ("second run", "1.linear")
    assert found_in(audit, "parameter") == ["1.linear.bias"]  # the weight is doubled in both
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_a_weight_that_is_cast_once() -> None:
    class Casting(Block):
        cast: torch.Tensor | None = None

        def body(self, x: torch.Tensor) -> torch.Tensor:
            weight, self.cast = (
                self.linear.weight if self.cast is None else self.cast,
                self.linear.weight.half().float(),
            )
            return self.drop(nn.functional.linear(x, weight))

    model = net(checkpointed(), Casting)
    assert first_of(model) == ("second run", "1.drop")
    assert model[1].cast is None  # type: ignore[union-attr]


def grad_cache(restored: bool) -> Run:
    """Forward by chunks without graphs, the loss of all of them, and forward again chunk by chunk."""

    def loop(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        chunks, states, outputs = x.chunk(2), [], []
        with torch.no_grad():
            for chunk in chunks:
                states.append(torch.get_rng_state())
                outputs.append(model(chunk))
        whole = torch.cat(outputs).requires_grad_()
        loss = (whole @ whole.t()).log_softmax(-1).diagonal().mean()
        loss.backward()
        assert whole.grad is not None
        for chunk, state, gradient in zip(chunks, states, whole.grad.chunk(2), strict=True):
            with torch.random.fork_rng():
                if restored:
                    torch.set_rng_state(state)
                model(chunk).backward(gradient)
        return loss.detach()

    return loop


def without_cache(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    outputs = [model(chunk) for chunk in x.chunk(2)]
    whole = torch.cat(outputs).detach().requires_grad_()
    loss = (whole @ whole.t()).log_softmax(-1).diagonal().mean()
    loss.backward()
    assert whole.grad is not None
    for output, gradient in zip(outputs, whole.grad.chunk(2), strict=True):
        output.backward(gradient)
    return loss.detach()


def test_a_gradient_cache_with_a_stale_generator() -> None:
    model = net(plainly)
    assert memplan.audit(model, sample(), grad_cache(True), reference=without_cache).exact
    audit = memplan.audit(model, sample(), grad_cache(False), reference=without_cache)
    assert (audit.findings[0].kind, audit.findings[0].name) == ("second run", "0.drop")
    assert found_in(audit, "output") == []


def test_a_checkpoint_that_fails() -> None:
    class Growing(Block):
        calls = 0

        def body(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().body(x) if self.calls % 2 else self.linear(x)

    audit = memplan.audit(net(checkpointed(), Growing), sample())
    assert [one.kind for one in audit.findings] == ["error"]
    assert "CheckpointError" in str(audit)


def test_budgeted_activations_with_dropout() -> None:
    """A partition that makes masks again draws others. PyTorch's own kernels run, so all else has equal bits."""
    model = torch.compile(net(plainly), backend="aot_eager")
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        audit = memplan.audit(model, sample())  # type: ignore[arg-type]
    assert audit.switched_off == ("1 compiled call",)
    assert found_in(audit, "output") == []
    assert "1.linear.weight" in found_in(audit, "gradient")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo, which looks for a gradient
def test_compiled_code_that_is_wrong() -> None:
    def wrong(graph: torch.fx.GraphModule, inputs: Any) -> Run:
        return lambda *args: tuple(output * 1.5 for output in graph(*args))

    class Compiled(Block):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.drop(torch.compile(lambda t: t.exp(), backend=wrong)(self.linear(x))))  # type: ignore[no-any-return]

    audit = memplan.audit(net(plainly, Compiled), sample())
    assert (audit.findings[0].kind, audit.findings[0].module) == ("output", "1.drop"), str(audit)


def test_a_generator_of_the_models_own() -> None:
    class Drawing(Block):
        def __init__(self, around: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
            super().__init__(around)
            self.source = torch.Generator().manual_seed(0)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return super().body(x * torch.rand(16, generator=self.source))

    model = net(checkpointed(), Drawing)
    audit = memplan.audit(model, sample())
    assert (audit.findings[0].kind, audit.findings[0].name) == ("second run", "1.linear")
    assert found_in(audit, "generator") == ["generator 0 of the model"]
    assert torch.equal(model[1].source.get_state(), torch.Generator().manual_seed(0).get_state())  # type: ignore[union-attr]


def test_a_checkpoint_within_compiled_code() -> None:
    """PyTorch leaves the generator to its partitioner there, which the backend for debugging has not."""
    audit = memplan.audit(torch.compile(net(checkpointed()), backend="eager"), sample())  # type: ignore[arg-type]
    assert audit.findings[0].name == "1.norm.weight"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
def test_kernels_of_inductor() -> None:
    missing = private.missing_compiler(torch.device("cpu"))
    if missing:
        pytest.skip(f"there is no {missing}")
    compiled = torch.compile(net(plainly))
    audit = memplan.audit(compiled, sample())  # type: ignore[arg-type]
    assert found_in(audit, "output") == ["output"]  # Inductor's dropout has masks of its own
    assert audit.findings[0].relative > 0.01
    with torch._inductor.config.patch(fallback_random=True):
        torch._dynamo.reset()
        rounded = memplan.audit(compiled, sample())  # type: ignore[arg-type]
    assert all(one.relative < 1e-5 for one in rounded.findings)


# -- no faults --------------------------------------------------------------------------------------------------------


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
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(options)  # type: ignore[operator]


QUICK = ("gpt2", "bert", "dit")


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
    assert any("checkpoint" in text for text in audit.switched_off) or name == "convnext"  # which has none
    if getattr(model, "supports_gradient_checkpointing", False):
        before = torch.get_rng_state()
        model(**batch)
        draws = not torch.equal(before, torch.get_rng_state())
        checkpoint_all(model, use_reentrant=False, preserve_rng_state=False)
        assert memplan.audit(model, batch).exact is not draws


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
