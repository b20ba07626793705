"""Planning and planned steps amid what else is going on: threads, checkpoints, hooks on what autograd saves."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.capture.attributes import kept_memory
from memplan.installed.planned_forward import planned_forward
from tests.support.zoo import assert_same_bits, copied


def layers() -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))))


def trained(net: nn.Module, batches: list[torch.Tensor]) -> Any:
    """Losses, gradients of inputs, and what parameters are in the end."""
    optimizer, found = torch.optim.SGD(net.parameters(), 0.1), []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        x = batch.detach().clone().requires_grad_()
        optimizer.zero_grad()
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        found += [loss, x.grad]
    return copied([*found, *net.parameters()])


def test_models_are_planned_in_several_threads_at_once() -> None:
    torch.manual_seed(0)
    plain = [layers() for _ in range(3)]
    planned, batches = copy.deepcopy(plain), [[torch.randn(256 + 8 * i, 16)] for i in range(3)]
    errors: list[BaseException] = []

    def plan(index: int) -> None:
        try:
            memplan.apply(
                planned[index], batches[index][0].requires_grad_(), memplan.Budget(activations=0.9), costs="estimate"
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=plan, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for before, after, batch in zip(plain, planned, batches, strict=True):
        assert isinstance(memplan.plan_of(after), memplan.Plan)  # nobody took another's trace for hooks of the model
        assert_same_bits(trained(before, batch), trained(after, batch))


def test_a_model_that_is_planned_in_one_thread_is_called_in_others() -> None:
    torch.manual_seed(0)
    plain = layers().eval()
    planned, batches = copy.deepcopy(plain), [torch.randn(64 + 8 * i, 16) for i in range(4)]
    memplan.apply(planned, None, 10**8, costs="estimate", dynamic="never")
    found: dict[int, torch.Tensor] = {}

    def call(index: int) -> None:
        with torch.set_grad_enabled(index % 2 == 0):
            found[index] = planned(batches[index]).detach()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same_bits([plain(batch).detach() for batch in batches], [found[i] for i in range(4)])


def test_other_threads_go_on_making_tuples_meanwhile() -> None:
    """Each takes long enough for another thread to run in the middle of it."""
    errors, over = list[BaseException](), threading.Event()

    def make() -> None:
        while not over.is_set():
            try:
                tuple(number for number in range(3000))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for count in range(20):
        assert all(callable(function) for function in kept_memory._of_the_process(-count))
    over.set()
    for thread in threads:
        thread.join()
    assert not errors


class Region(nn.Module):
    """A planned part, and others, in a part of the model that the user checkpoints."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.norm, self.inner, self.head, self.use_reentrant = nn.LayerNorm(16), layers(), layers(), use_reentrant

    def region(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.sin(self.inner(self.norm(x))))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.region, x, use_reentrant=self.use_reentrant))  # type: ignore[no-any-return]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_parts_are_planned_within_a_checkpoint_of_the_user(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    plain, batches = Region(use_reentrant), [torch.randn(n, 16) for n in (256, 128, 256, 128)]
    net = copy.deepcopy(plain)
    memplan.apply(net.inner, None, memplan.Budget(activations=0.9), costs="estimate")
    assert_same_bits(trained(plain, batches), trained(net, batches))
    assert isinstance(memplan.plan_of(net.inner), memplan.Plan)
    assert len({id(step.key) for step in planned_forward(net.inner).steps}) == 2  # type: ignore[union-attr]


def test_parametrizations_that_calls_share_have_no_part_in_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + 0.1 * torch.randn_like(weight)

    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(32, 16)
    parametrize.register_parametrization(net[0], "weight", Noisy())

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        with parametrize.cached():
            found = (net(x) - net(x)).square().sum() + net(x).sum()
        found.backward()
        return found.detach()

    before = loss()
    memplan.apply(net, x, 1.0, costs="estimate", in_flight=3)
    assert torch.equal(loss(), before)
    assert "parametrize.cached" in caplog.text


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("part", [0.8, 1.0])
def test_what_runs_again_runs_by_the_settings_of_forward(part: float) -> None:
    """Nothing runs again in the second plan."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
    x = torch.randn(128, 32)

    def gradients() -> Any:
        net.zero_grad()
        with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
            loss = net(x).square().mean()
        loss.backward()
        return copied([p.grad for p in net.parameters()])

    plain = gradients()
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        memplan.apply(net, x, part, costs="estimate")
    if part == 1.0:
        assert_same_bits(gradients(), plain)
        return
    with pytest.raises(RuntimeError, match="mkldnn is True, planned for False, in backward"):
        gradients()


def test_hooks_on_what_autograd_saves_have_no_part_in_a_plan() -> None:
    def packed(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(type(tensor))
        return tensor

    torch.manual_seed(0)
    plain, batches, seen = layers(), [torch.randn(256, 16)], list[type]()
    net = copy.deepcopy(plain)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        memplan.apply(net, batches[0].clone().requires_grad_(), memplan.Budget(activations=0.9), costs="estimate")
        assert not seen
        found = trained(net, batches)
    assert_same_bits(trained(plain, batches), found)


def test_a_part_with_parameters_on_the_host_is_planned_with_the_model_around_it() -> None:
    def losses(net: nn.Sequential) -> Any:
        torch.manual_seed(1)
        given = []
        for _ in range(2):
            net.zero_grad()
            loss = net(torch.ones(32, 16)).pow(2).mean()
            loss.backward()
            given.append(copied([loss, [p.grad for p in net.parameters()]]))
        return given

    torch.manual_seed(0)
    net = nn.Sequential(layers(), nn.Linear(16, 16))
    expected = losses(net)
    floor_bytes = memplan.plan(net[0], torch.ones(32, 16), 1.0, costs="estimate").floor_bytes
    options: dict[str, Any] = {"costs": "estimate", "host_budget": "1GiB", "link": memplan.Link(25e9, 25e9)}
    memplan.apply(net[0], torch.ones(32, 16), int(0.7 * floor_bytes), **options)
    plan = memplan.plan_of(net[0])
    assert plan is not None and any(v.fetched for v in plan.problem.graph.values)
    memplan.apply(net, torch.ones(32, 16), 1.0, costs="estimate")  # which aborted the process
    assert_same_bits(losses(net), expected)
