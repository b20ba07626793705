"""What a loop holds while forward runs, and the plan does not know of: gradients of the step before, other forwards."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.support.meter import LiveMeter
from tests.support.zoo import MODELS, assert_same_bits, copied, tensors_of


class Stack(nn.Sequential):
    """Blocks, and a loss of what they give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).pow(2).mean()


def stack(seed: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return Stack(*blocks).train(), torch.randn(96, 64)


def warnings_in(caplog: pytest.LogCaptureFixture, text: str = "") -> list[str]:
    told = [r.getMessage() for r in caplog.records if r.name == "memplan" and r.levelno >= logging.WARNING]
    return [message for message in told if text in message]


def peak_of_steps(net: nn.Module, sample: torch.Tensor, zeroed: str, steps: int = 3) -> tuple[int, Any]:
    """The most that the last step holds, and what it leaves. zeroed: when gradients are."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(1)
    for _ in range(steps):
        meter = LiveMeter()
        meter.register([*net.parameters(), *net.buffers(), sample, *(p.grad for p in net.parameters())])
        with meter:
            if zeroed == "before":
                optimizer.zero_grad()
            loss = net(sample)
            if zeroed == "between":
                optimizer.zero_grad()
            loss.backward()
            del loss
        optimizer.step()
    return meter.peak_bytes, copied([list(net.parameters()), [p.grad for p in net.parameters()], torch.get_rng_state()])


@pytest.mark.parametrize("zeroed", ["before", "between", "never"])
@pytest.mark.parametrize("budget", [0.75, "bytes"])
def test_the_peak_holds_wherever_the_loop_zeroes_gradients(
    zeroed: str, budget: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The first plan counts no gradients when forward begins; where there are some it is made again."""
    plain, sample = stack(0)
    net, _ = stack(0)
    if budget == "bytes":
        least = memplan.plan(net, sample, 1.0, costs="estimate", accumulate=True).floor_bytes
        budget = least + 20_000
    memplan.apply(net, sample, budget, costs="estimate")
    with caplog.at_level(logging.WARNING, "memplan"):
        peak_bytes, after = peak_of_steps(net, sample, zeroed)
    assert_same_bits(after, peak_of_steps(plain, sample, zeroed)[1])
    plan = memplan.plan_of(net)
    assert plan is not None
    assert peak_bytes <= plan.live_peak_bytes <= plan.peak_bytes <= plan.problem.budget_bytes
    assert plan.problem.accumulate == (zeroed != "before")
    told = warnings_in(caplog, "of gradients are there when forward begins")
    assert len(told) == (zeroed != "before")
    assert all("accumulate=True" in text for text in told)


def test_gradients_that_fit_beside_the_plan_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    net, sample = stack(0)
    memplan.apply(net, sample, "1GB", costs="estimate")
    steps = list(vars(net)["forward"].steps)
    with caplog.at_level(logging.WARNING, "memplan"):
        peak_of_steps(net, sample, "between")
    assert vars(net)["forward"].steps == steps and not warnings_in(caplog)


@pytest.mark.parametrize("on_mismatch", ["replan", "raise"])
def test_a_budget_without_room_for_held_gradients_is_told_of(
    on_mismatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What can't be planned is not worth a training that ends; nor is what must not be."""
    plain, sample = stack(0)
    net, _ = stack(0)
    floor_bytes = memplan.plan(net, sample, 1.0, costs="estimate").floor_bytes
    budget = floor_bytes if on_mismatch == "replan" else floor_bytes + 1
    memplan.apply(net, sample, budget, costs="estimate", on_mismatch=on_mismatch)
    steps = list(vars(net)["forward"].steps)
    with caplog.at_level(logging.WARNING, "memplan"):
        assert_same_bits(peak_of_steps(net, sample, "between")[1], peak_of_steps(plain, sample, "between")[1])
    (told,) = warnings_in(caplog)
    assert "may be held, over the budget of" in told and "accumulate=True" in told
    assert vars(net)["forward"].steps == steps
    assert memplan.plan_of(net).problem.budget_bytes == budget


def test_one_stray_gradient_does_not_change_what_comes_later() -> None:
    """A larger batch that fits without it is not refused, and steps that zero gradients run a plan without them."""
    net, sample = stack(0)
    larger = torch.randn(300, 64)
    memplan.apply(net, sample, memplan.plan(net, larger, 1.0, costs="estimate").floor_bytes + 1000, costs="estimate")
    net(sample).backward()
    for batch in (sample, larger, sample):
        net(batch).backward()
        net.zero_grad()
    assert not memplan.plan_of(net).problem.accumulate
    copied_net = copy.deepcopy(net)
    copied_net.zero_grad()
    copied_net(larger).backward()


@pytest.mark.parametrize(
    "budget", [0.8, memplan.Budget(device=0.8), memplan.Budget(device=1.0), memplan.Budget(activations=0.8)]
)
def test_fractions_are_of_what_is_held_unplanned_with_the_gradients(budget: Any) -> None:
    net, sample = stack(0)
    wanted = memplan.plan(net, sample, budget, costs="estimate", accumulate=True)
    memplan.apply(net, sample, budget, costs="estimate")
    first = memplan.plan_of(net)
    for _ in range(2):
        net(sample).backward()
    assert memplan.plan_of(net).problem.budget_bytes == wanted.problem.budget_bytes
    net.zero_grad()
    net(sample).backward()
    assert memplan.plan_of(net) is first


def test_gradients_that_are_there_at_the_first_call_are_counted() -> None:
    net, sample = stack(0)
    net(sample).backward()
    memplan.apply(net, None, 0.75, costs="estimate")
    net(sample).backward()
    assert memplan.plan_of(net).problem.accumulate


def test_a_given_plan_that_counts_them_stays(caplog: pytest.LogCaptureFixture) -> None:
    net, sample = stack(0)
    plan = memplan.plan(net, sample, 0.9, costs="estimate", accumulate=True)
    memplan.apply(net, sample, plan=plan)
    for _ in range(2):
        net(sample).backward()
    assert memplan.plan_of(net) is plan and not warnings_in(caplog)


def test_an_interrupted_search_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = stack(0)
    memplan.apply(net, sample, 0.75, costs="estimate")
    steps = list(vars(net)["forward"].steps)
    net(sample).backward()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("memplan.planning.plan_search.PlanSearch.plan", interrupted)
        with pytest.raises(KeyboardInterrupt):
            net(sample)
    assert vars(net)["forward"].steps == steps
    net(sample).backward()
    assert memplan.plan_of(net).problem.accumulate


def test_gradients_of_any_layout_and_parameters_that_are_gone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 16)).train()
    ids = torch.randint(0, 50, (8, 4))
    memplan.apply(net, ids, "1MB", costs="estimate")
    for _ in range(3):
        net(ids).sum().backward()
    other, sample = stack(0)
    memplan.apply(other, sample, 0.75, costs="estimate")
    gone = weakref.ref(other[0][0].weight)
    other[0][0].weight = nn.Parameter(other[0][0].weight.detach().clone())
    other(sample).backward()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dynamic", ["never", "all"])
def test_the_sample_is_not_held(dynamic: str) -> None:
    net, sample = stack(0)
    memplan.apply(net, sample, 0.75, costs="estimate", dynamic=dynamic)
    gone = weakref.ref(sample)
    del sample
    gc.collect()
    assert gone() is None


class Masked(nn.Module):
    """Its loss is of some rows, and how many those are depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = labels != -100
        return nn.functional.cross_entropy(self.layer(x)[rows], labels[rows])


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return nn.functional.cross_entropy(hidden * 2 if hidden.sum() > 0 else hidden, labels)


@pytest.mark.parametrize("dynamic", ["never", "auto"])
@pytest.mark.parametrize("kind", [Masked, Branching])
def test_a_model_goes_with_its_plan_and_a_sample_before(kind: type[nn.Module], dynamic: str) -> None:
    """PyTorch's caches hold environments of symbols, and those must not lead to what was traced."""
    net = kind()
    x, labels = torch.randn(40, 64), torch.randint(0, 16, (40,))
    labels[::3] = -100
    gone = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        memplan.apply(net, (x, labels), 1.0, costs="estimate", dynamic=dynamic)
        del x
        assert gone() is None
    finally:
        gc.enable()
    for rows in (30, 20):
        net(torch.randn(rows, 64), labels[:rows]).backward()
    gone = weakref.ref(net.layer.weight)  # type: ignore[arg-type, union-attr]
    memplan.remove(net)
    del net
    gc.collect()
    assert gone() is None


def test_with_accumulate_nothing_is_planned_again() -> None:
    net, sample = MODELS["gpt2"](0)
    memplan.apply(net, sample, 0.8, costs="estimate", accumulate=True)
    steps = list(vars(net)["forward"].steps)
    for _ in range(3):
        net(**sample).loss.backward()
    assert vars(net)["forward"].steps == steps


def test_several_forwards_at_once_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    net, sample = stack(0)
    base = memplan.plan(net, sample, 1.0, costs="estimate")

    def told(budget: Any, autocast: bool = False, **how: Any) -> list[str]:
        caplog.clear()
        for step in range(3):
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                if step == 0:
                    memplan.apply(net, sample, budget, costs="estimate", **how)
                loss = net(sample) + net(sample + 1)
            loss.backward()
            net.zero_grad()
            net(sample).backward()
        return [message.partition("2 forwards wait for their backward at once, and ")[2][:20]
                for message in warnings_in(caplog, "at once")]  # fmt: skip

    over, casts = "the plan is for one:", "in one context of autocast"[:20]
    with caplog.at_level(logging.WARNING, "memplan"):
        assert told(2 * base.peak_bytes) == []
        assert told(2 * base.peak_bytes, autocast=True) == [casts]
        assert told(0.75) == [over]
        assert told(1.0, in_flight=2) == []
        net(sample)  # one that waits for nothing
        net(sample).backward()
        assert warnings_in(caplog, "at once") == []


class Wide(nn.Module):
    """Returns its loss, logits that are most of what a step holds, and a part of its input.

    - in_forward: it peaks in forward.
    - keeps: it has the logits in an attribute too.
    """

    def __init__(self, in_forward: bool = True, keeps: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        self.head, self.in_forward, self.keeps = nn.Linear(64, 4096), in_forward, keeps
        self.logits: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(x))
        if self.keeps:
            self.logits = logits
        weight = logits.detach().sort(1)[0][:, :1] if self.in_forward else logits
        return {"logits": logits, "loss": (logits * weight).mean(), "part": x[:, :1]}


LOGITS_BYTES = 512 * 4096 * 4
TOLD = "of outputs of earlier calls are there while the next one runs"


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("kept", [("logits", "loss"), ("logits",), ("loss", "part")])
@pytest.mark.parametrize("room", [False, True])
def test_outputs_of_earlier_calls_are_told_of_where_they_do_not_fit(
    room: bool, kept: tuple[str, ...], in_forward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net, x = Wide(in_forward), torch.randn(512, 64)
    plan = memplan.plan(net, x, "min", costs="estimate")
    budget_bytes = plan.peak_bytes + 2 * LOGITS_BYTES * room
    memplan.apply(net, x, budget_bytes, costs="estimate")
    with caplog.at_level(logging.WARNING, "memplan"), LiveMeter() as meter:
        for _ in range(4):
            outputs = net(x)
            outputs["loss"].backward()
            net.zero_grad()
            outputs = {name: outputs[name].detach() for name in kept}  # other tensors in the same memory
    told = warnings_in(caplog, TOLD)
    beyond_bytes = plan.problem.resident_bytes + meter.peak_bytes - budget_bytes
    assert len(told) == (beyond_bytes > LOGITS_BYTES // 2) == (in_forward and "logits" in kept and not room)
    held_bytes = LOGITS_BYTES + 4 * ("loss" in kept)
    assert all(f"held_bytes={held_bytes})" in message for message in told)


def test_room_for_outputs_of_earlier_calls_is_room_enough(caplog: pytest.LogCaptureFixture) -> None:
    net, x = Wide(), torch.randn(512, 64)
    room = memplan.Surroundings(held_bytes=LOGITS_BYTES + 4)
    memplan.apply(net, x, "min", costs="estimate", surroundings=room)
    with caplog.at_level(logging.WARNING, "memplan"):
        for _ in range(3):
            outputs = net(x)
            outputs["loss"].backward()
    assert warnings_in(caplog, TOLD) == []


def test_outputs_that_the_model_lets_go_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    net, x = Wide(keeps=True), torch.randn(512, 64)
    memplan.apply(net, x, "min", costs="estimate")
    with caplog.at_level(logging.WARNING, "memplan"):
        for _ in range(3):
            net(x)["loss"].backward()
    assert net.logits is not None and warnings_in(caplog, TOLD) == []


class Tied(nn.Module):
    """A small language model whose embedding is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.linear(self.embedding(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten().roll(1))


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("grads", ["surface", "edges"])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_backward_through_several_forwards_has_the_bits_of_eager_or_is_told_of(
    tied: bool, held: bool, grads: Any, in_flight: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = Tied()
    if not tied:
        plain.head.weight = nn.Parameter(plain.head.weight.detach().clone())
    ids = torch.randint(50, (3, 4, 16))
    options = {"costs": "estimate", "grads": grads, "in_flight": in_flight}
    net = memplan.apply(copy.deepcopy(plain), {"ids": ids[0]}, 10**9, **options)  # type: ignore[arg-type]
    found = []
    with caplog.at_level(logging.WARNING, "memplan"):
        for model in (plain, net):
            for _ in range(1 + held):
                (model(ids[0]) + 0.3 * model(ids[1]) + 0.7 * model(ids[2])).backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
    subjects = ["gradients that are there already"] * (held and grads == "surface")
    subjects += ["embedding.weight, which forward uses more than once"] * tied
    told = warnings_in(caplog, "one backward goes through a planned forward and others")
    assert len(told) == len(subjects)
    assert all(any(subject in message for message in told) for subject in subjects)
    assert bool(told) != all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())  # type: ignore[arg-type]


@pytest.mark.parametrize("grads", ["surface", "edges"])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_that_the_loss_uses_beside_the_plan(
    tied: bool, held: bool, grads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = Tied()
    if not tied:
        plain.head.weight = nn.Parameter(plain.head.weight.detach().clone())
    ids = torch.randint(50, (4, 16))
    net = memplan.apply(copy.deepcopy(plain), {"ids": ids}, 10**9, costs="estimate", grads=grads)
    found = []
    with caplog.at_level(logging.WARNING, "memplan"):
        for model in (plain, net):
            for _ in range(1 + held):
                (model(ids) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())).backward()
            found.append([p.grad for p in model.parameters()])
    told = warnings_in(caplog, "through parameters beside it")
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
    if grads == "surface":
        assert len(told) == tied + held
        assert bool(told) != same


def test_several_forwards_planned_as_one_have_the_bits_of_eager() -> None:
    torch.manual_seed(0)
    plain, ids = Tied(), torch.randint(50, (2, 4, 16))
    net = copy.deepcopy(plain)

    def both(model: nn.Module, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return model(first) + 0.3 * model(second)  # type: ignore[no-any-return]

    memplan.apply(net, tuple(ids), 10**9, costs="estimate", loss_fn=both)
    both(plain, *ids).backward()
    net(*ids).backward()
    assert_same_bits([p.grad for p in plain.parameters()], [p.grad for p in net.parameters()])


def test_what_a_waiting_forward_holds_is_what_the_plan_says() -> None:
    net, sample = stack(0)
    memplan.apply(net, sample, 0.75, costs="estimate")
    output = net(sample)
    (state,) = vars(net)["forward"].steps[0].runner.waiting
    inside = {t.untyped_storage()._cdata for t in (sample, output)}
    beside = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(state.saved)}
    assert state.saved_bytes == sum(size for key, size in beside.items() if key not in inside) > 0
    output.backward()
    assert not state.saved


class Pruned(nn.Module):
    """A weight and a table that are the first rows of larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2000, 64)[:64])
        self.register_buffer("table", torch.randn(3000, 64)[:96])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ self.weight) * self.table).pow(2).mean()


class Queue(nn.Module):
    """A queue that every forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("queue", torch.zeros(2000, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        self.queue[:96] = x.detach()
        return torch.tanh(x).pow(2).mean()


def assert_the_peak_holds(net: nn.Module, **options: Any) -> None:
    memplan.apply(net, torch.randn(96, 64), 1.0, costs="estimate", on_infeasible="min", **options)
    peak_bytes, _ = peak_of_steps(net, torch.randn(96, 64), "before")
    plan = memplan.plan_of(net)
    assert plan is not None
    assert 0.98 * plan.peak_bytes < peak_bytes <= plan.peak_bytes


def test_memory_behind_parameters_and_buffers_counts_as_a_whole() -> None:
    assert_the_peak_holds(Pruned())


def test_buffers_that_are_kept_for_another_run_are_counted() -> None:
    assert_the_peak_holds(Queue(), on_oom="replan")
