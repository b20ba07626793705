"""Audits find faults that are planted in checkpoints, hooks and compiled code, with the name where each begins."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import memplan
from memplan import torch_private as private
from tests.support.audited import Block, Run, checkpointed, first_of, found_in, net, plainly, sample


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
