"""What only a CUDA device runs, as far as a machine without one can show it: fake tensors and stand-ins for the device.

What needs a device itself is in tests/runtime/test_gpu.py and tests/runtime/test_offload_gpu.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan import torch_private as private
from memplan.api import named_budget
from memplan.capture.analysis.traced import Traced
from memplan.capture.arguments_key import ArgumentsKey
from memplan.capture.capturable import check_devices
from memplan.capture.capture import capture
from memplan.capture.ops import op_facts
from memplan.capture.ops.layout import device_bytes_of
from memplan.capture.ops.real_results import corrected_outputs
from memplan.capture.trace.call import Call, CallReader
from memplan.costs import bench
from memplan.costs import optimizer as beside
from memplan.costs.bench import Bench
from memplan.costs.optimizer import _example, host_update_s_per_byte, optimizer_memory
from memplan.errors import or_raise
from memplan.installed.planned_forward import planned_forward
from memplan.planning.limits import automatic_bytes, prepare_allocator
from memplan.planning.planner import Planner
from memplan.planning.settings import Settings
from memplan.problem.caching_allocator import Segment
from memplan.problem.data import Costs, Problem, Requests
from memplan.problem.schedule import BOUNDARY, Boundary, Prefetch, Wait, schedule_of
from memplan.runtime.host.fetch import FetchedWhereUsed
from memplan.runtime.host.streams import CudaStreams, FakeStreams
from memplan.runtime.program.lower import lower
from memplan.runtime.program.rng import held_rng, replay_random, restore_held_rng, restore_rng, save_rng
from memplan.runtime.watch.meter import Observer
from tests.support.small import optimizer_needs
from tests.support.zoo import assert_same_bits, copied

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
MIB = 1 << 20


# -- capture ----------------------------------------------------------------------------------------------------------


def test_what_attention_draws_with_is_on_the_host_where_its_backward_looks_for_it() -> None:
    op = aten._scaled_dot_product_efficient_attention.default
    with private.FakeTensorMode():
        q = torch.empty(2, 4, 64, 32, device=CUDA)
        outputs = corrected_outputs(op, (q, q, q, None, True, 0.1), op(q, q, q, None, True, 0.1))
    assert [t.device.type for t in outputs] == ["cuda", "cuda", "cpu", "cpu"]
    assert [(t.shape, t.dtype) for t in outputs[2:]] == [((), torch.int64)] * 2


@pytest.mark.parametrize("with_backward", [True, False])
def test_attention_by_cudnn_saves_nothing_if_it_has_no_backward(
    with_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "leave_out", lambda tensor: None)  # of a trace, and there is none here
    op = aten._scaled_dot_product_cudnn_attention.default
    with private.FakeTensorMode():
        q = torch.empty(2, 4, 64, 32, device=CUDA, dtype=torch.bfloat16)
        args = (q, q, q, None, with_backward, 0.0, True)
        outputs = corrected_outputs(op, args, op(*args))
    assert isinstance(outputs[0], torch.Tensor) and (outputs[1] is not None) == with_backward


def test_notes_of_batch_norm_have_the_size_that_cudnn_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(
        torch._C, "_get_cudnn_batch_norm_reserve_space_size", lambda x, _: asked.append(x) or 4099, raising=False
    )
    op = aten.cudnn_batch_norm.default
    with private.FakeTensorMode():
        x = torch.empty(2, 8, 4, 4, device=CUDA).to(memory_format=torch.channels_last)
        row = torch.empty(8, device=CUDA)
        args = (x, row, row, row, row, True, 0.1, 1e-5)
        notes = torch.empty(0, dtype=torch.uint8, device=CUDA)
        outputs = corrected_outputs(op, args, (x, row, row, notes))
    assert outputs[3].shape == (4099,) and outputs[3].device == CUDA
    assert asked[0].stride() == x.stride()


def test_what_lies_on_the_host_takes_nothing_of_the_device() -> None:
    assert device_bytes_of(torch.empty(100), CUDA) == 0
    assert device_bytes_of(torch.empty(100, device="meta"), CUDA) == 512
    assert device_bytes_of(torch.empty(100), torch.device("cpu")) == 400


def _traced(model: nn.Module, sample: Any) -> Traced:
    return capture(model, model.forward, sample).traced


class Seeding(nn.Module):
    def __init__(self, seed: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.seed = nn.Linear(4, 4), seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seed()
        return self.linear(x).sum()


@pytest.mark.parametrize(
    "seed",
    [lambda: torch.cuda.manual_seed(0), lambda: torch.cuda.manual_seed_all(0), lambda: torch.cuda.random.seed()],
    ids=["manual_seed", "manual_seed_all", "seed"],
)
def test_seeding_the_device_in_forward_is_refused(seed: Callable[[], Any]) -> None:
    with pytest.raises(memplan.UnsupportedModel, match="seeds the generator"):
        _traced(Seeding(seed), torch.randn(2, 4))


def test_a_planned_device_has_a_number_and_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().target_device is None and Settings(device="cpu").target_device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device here"):
        memplan.plan(nn.Linear(4, 4), torch.randn(2, 4), 1.0, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert Settings(device="cuda").target_device == torch.device("cuda", 1)
    assert Settings(device="cuda:0").target_device == CUDA


def test_arguments_may_be_on_the_host_beside_those_on_the_device() -> None:
    there = torch.device("meta")  # stands for one
    read = CallReader(lambda ids, lengths: None).read
    call: Call = read((torch.empty(2, 4, device=there), torch.tensor([3, 4])), {})
    check_devices(call, there, given=False)
    with pytest.raises(ValueError, match="ids is on cpu, the model on meta"):
        check_devices(read((torch.ones(2, 4), torch.tensor([3, 4])), {}), there, given=False)
    key = ArgumentsKey(call, None)
    assert key.mismatch(call) is None
    moved = read((torch.empty(2, 4, device=there), torch.empty(2, dtype=torch.int64, device=there)), {})
    assert "lengths is" in (key.mismatch(moved) or "")
    assert ArgumentsKey(read((torch.ones(2, 4), torch.tensor([3, 4])), {}), "meta").mismatch(moved) is None


# -- generators -------------------------------------------------------------------------------------------------------


class Generator:
    """Stands for the default generator of a CUDA device."""

    def __init__(self) -> None:
        self.seed, self.offset = 5, 8

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> list[Generator]:
    found = [Generator(), Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return found


def test_a_replay_leaves_the_generator_as_it_was(generators: list[Generator]) -> None:
    device = torch.device("cuda", 1)
    state = save_rng(device)
    generators[1].offset = 40

    def draw() -> tuple[int, int]:
        generators[1].offset += 4
        return generators[1].seed, generators[1].offset

    assert replay_random(state, device, draw) == (5, 12)
    assert (generators[1].seed, generators[1].offset) == (5, 40)
    assert generators[0].offset == 8


def test_a_device_without_a_number_is_the_current_one(generators: list[Generator]) -> None:
    generators[1].offset = 400
    assert save_rng(torch.device("cuda")) == (5, 400)
    restore_rng(torch.device("cuda"), (7, 12))
    assert (generators[0].seed, generators[1].seed, generators[1].offset) == (5, 7, 12)


def test_a_step_on_a_device_holds_the_hosts_generator_too(generators: list[Generator]) -> None:
    state = held_rng(CUDA)
    drawn = torch.rand(3)
    generators[0].offset = 100
    restore_held_rng(CUDA, state)
    assert torch.equal(torch.rand(3), drawn) and generators[0].offset == 8


class Noisy(nn.Module):
    """Draws noise on the host, as `torch.rand(shape).to(device)` does, where dropout draws on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x) * torch.rand(x.shape))
        return torch.tanh(self.linear(hidden)).sum()


def test_what_is_drawn_on_the_host_is_drawn_there_again() -> None:
    """Also where the step runs on a device with a generator of its own."""
    traced = dataclasses.replace(_traced(Noisy(), torch.randn(64, 16)), device=CUDA)
    graph = traced.graph
    (random,) = (i for i, op in enumerate(graph.ops) if op.random)
    reader = next(
        i for i, op in enumerate(graph.ops) if i >= graph.boundary and graph.ops[random].outputs[0] in op.inputs
    )
    order = [*range(graph.boundary), BOUNDARY, *range(graph.boundary, reader), random, *range(reader, len(graph.ops))]
    Problem(graph, Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops)))
    program = lower(schedule_of(graph, order), traced)
    saved = [n for n in program.forward.graph.nodes if n.target is save_rng]
    replayed = [n for n in program.backward.graph.nodes if n.target is replay_random]
    assert [n.args[0].type for n in saved] == ["cpu"] and [n.args[1].type for n in replayed] == ["cpu"]


@torch.library.custom_op("memplan_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Dropout of a user's own, of which PyTorch does not know that it draws."""
    return x * (torch.rand(x.shape) < 0.5)


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _noise_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (kept,) = ctx.saved_tensors
    return gradient * (kept != 0)


noise.register_autograd(_noise_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


class OwnOps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = noise(torch.tanh(layer(x)))
        return x.sum()


def test_an_op_of_a_users_own_may_draw_random_numbers() -> None:
    x = torch.randn(256, 32)

    def outcome(budget: int | None) -> Any:
        torch.manual_seed(0)
        net = OwnOps()
        if budget is not None:
            memplan.apply(net, x, budget, costs="estimate")
            plan = memplan.plan_of(net)
            assert plan is not None and any("noise" in plan.problem.graph.ops[i].kind for i in plan.recomputed)
        torch.manual_seed(1)
        loss = net(x)
        loss.backward()
        return copied([loss, [p.grad for p in net.parameters()]])

    floor = memplan.plan(OwnOps(), x, 1.0, costs="estimate").floor_bytes
    assert_same_bits(outcome(None), outcome(floor))


# -- memory -----------------------------------------------------------------------------------------------------------


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(256, 128)), nn.Parameter(torch.zeros(128))]


SIZES = 256 * 128 * 4 + 128 * 4


def test_an_optimizer_that_steps_all_parameters_at_once_takes_copies_of_them() -> None:
    state_bytes, step_bytes = optimizer_needs(torch.optim.AdamW(parameters()), CUDA)
    assert (state_bytes, step_bytes) == (2 * SIZES, SIZES)
    one_by_one = optimizer_needs(torch.optim.AdamW(parameters(), foreach=False), CUDA)[1]
    assert one_by_one == optimizer_needs(torch.optim.AdamW(parameters()), torch.device("cpu"))[1]
    fused = optimizer_needs(torch.optim.AdamW(parameters(), fused=True), CUDA)
    assert fused == (2 * SIZES + 2 * 512, 0)  # counts of steps are on the device then


def test_an_optimizers_requests_are_its_state_and_what_it_frees_again() -> None:
    optimizer = torch.optim.AdamW(parameters())
    memory = optimizer_memory(optimizer, CUDA)
    found = Requests(update=memory.requests)
    assert list(found.state.values()) == [n for p in parameters() for n in 2 * [p.numel() * 4]]
    held = most = 0
    sizes = dict(found.state)
    for name, size_bytes in memory.requests:
        held += size_bytes or -sizes[name]
        sizes[name] = size_bytes
        most = max(most, held)
    assert held == memory.state_bytes and most == memory.state_bytes + memory.step_bytes
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stepped = Requests(update=optimizer_memory(optimizer, CUDA).requests)
    assert sorted(stepped.state.values()) == sorted(found.state.values())


def test_parameters_of_which_some_are_on_the_host_are_stepped_one_by_one() -> None:
    whole = parameters()
    alone = torch.optim.AdamW(whole, foreach=False)
    mixed = torch.optim.AdamW(whole)
    assert optimizer_needs(mixed, CUDA, [whole[1]])[1] == optimizer_needs(alone, CUDA, [whole[1]])[1]


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")], ids=["cuda", "cpu"])
def test_optimizers_with_odd_settings_are_foreseen(device: torch.device) -> None:
    for optimizer in (torch.optim.AdamW(parameters(), lr=torch.tensor(1e-3)), torch.optim.Adafactor(parameters())):
        state_bytes, step_bytes = optimizer_needs(optimizer, device)
        assert state_bytes > 0 and step_bytes > 0


def test_the_launch_of_an_op_is_not_timed_where_the_cpu_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, runs = [], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        synchronize = record

        def query(self) -> bool:
            return len(waited) < 2

        def elapsed_time(self, other: Event) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(private, "keep_busy", waited.append)
    assert bench._timed(lambda: runs.append(0), (), {}, CUDA) == 3e-3
    assert waited == [100_000, 400_000] and len(runs) == 2


def test_workspaces_of_libraries_are_in_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(private, "blas_workspace_bytes", lambda: 32 * MIB)
    multiplies = _traced(nn.Linear(4, 4), torch.randn(2, 4))
    elementwise = _traced(nn.PReLU(), torch.randn(2, 4))
    for kept in ((32 * MIB,), (32 * MIB, MIB)):  # PyTorch 2.11 has one for cuBLASLt, too
        monkeypatch.setattr(beside, "_kept", lambda device, kept=kept: kept)
        for measured in (False, True):
            assert beside.workspaces(multiplies, measured) == ()
            assert beside.workspaces(dataclasses.replace(multiplies, device=CUDA), measured) == 2 * kept
            assert beside.workspaces(dataclasses.replace(elementwise, device=CUDA), measured) == ()
        assert beside.most_library_bytes(CUDA) == 2 * sum(kept)
    monkeypatch.setattr(beside, "_kept", lambda device: ())  # they are scratch of each product
    assert beside.workspaces(dataclasses.replace(multiplies, device=CUDA), True) == ()
    assert beside.workspaces(dataclasses.replace(multiplies, device=CUDA), False) == (32 * MIB,)
    convolves = dataclasses.replace(_traced(nn.Conv2d(2, 2, 3), torch.randn(1, 2, 8, 8)), device=CUDA)
    assert beside.workspaces(convolves, True) == ()
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert beside.multiplies_matrices(convolves)


def test_the_size_of_a_workspace_is_what_pytorch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCublasWorkspaceSize", lambda: 12345, raising=False)
    assert private.blas_workspace_bytes() == 12345
    monkeypatch.delattr(torch._C, "_cuda_getCublasWorkspaceSize")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert private.blas_workspace_bytes() == 8_519_680
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    for major, expected in ((8, 8_519_680), (9, 32 * MIB), (12, 32 * MIB)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert private.blas_workspace_bytes() == expected


class Allocator:
    """Stands for what PyTorch's allocator tells of a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = self.peak = 1000
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "memory_stats", self._stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: setattr(self, "peak", self.held))

    def _stats(self, device: object = None) -> dict[str, int]:
        """Blocks are larger than what is asked for."""
        return {f"{kind}_bytes.all.{when}": bytes_ * factor for kind, factor in (("requested", 1), ("allocated", 2))
                for when, bytes_ in (("current", self.held), ("peak", self.peak))}  # fmt: skip

    def touch(self, size_bytes: int) -> None:
        """Hold so much for a moment."""
        self.peak = max(self.peak, self.held + size_bytes)

    def keep(self, size_bytes: int) -> None:
        self.held += size_bytes
        self.touch(0)


def test_what_a_library_keeps_is_no_scratch_of_the_op_that_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, model, x = Allocator(monkeypatch), nn.Linear(4, 4), torch.randn(2, 4)
    tensors = dict(model.named_parameters())
    bench = Bench(_traced(model, x), lambda kind, name, _: x if kind == "input" else tensors[name])
    first_run, runs = bench._first_run, list[int]()

    def run(index: int, args: Any, kwargs: Any) -> Any:
        if not runs:
            allocator.keep(32 * MIB)
        runs.append(index)
        allocator.touch(100)
        return first_run(index, args, kwargs)

    monkeypatch.setattr(bench, "_first_run", run)
    monkeypatch.setattr(private, "BlockRecord", lambda device: contextlib.nullcontext(SimpleNamespace(events=[])))
    assert bench._first_runs_cuda([0, 1])[0] == [100, 100]
    assert runs == [0, 0, 1, 1]


def test_blocks_that_an_op_asks_for_are_its_outputs_and_scratch() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    model = nn.LayerNorm(4)
    bench = Bench(_traced(model, x), lambda kind, name, _: x)
    result = torch.native_layer_norm(x, [4], model.weight, model.bias, 1e-5)
    mean, normed = result[1].data_ptr(), result[0].data_ptr()
    events = [(7, 0), (1, 512), (mean, 8), (1, 0), (1, 256), (normed, 32), (result[2].data_ptr(), 8)]
    assert bench._named(0, events, result) == ((-1, 512), (1, 8), (-1, 0), (-4, 256), (0, 32), (2, 8))
    assert bench._named(0, events[:-1], result) == ()  # one of its outputs came from elsewhere


def test_the_first_step_is_observed_by_the_allocators_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, told = Allocator(monkeypatch), list[tuple[int, float]]()
    allocator.touch(10_000)  # before the step
    observer = Observer(CUDA, list, lambda grown, time_s: told.append((grown, time_s)), lambda storage: False)
    for peak in (700, 300):
        with observer.forward([]):
            allocator.touch(500)
        with observer.backward():
            allocator.touch(peak)
    assert observer.finished and [grown for grown, _ in told] == [700]


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    ],
)
def test_libraries_run_out_of_memory_in_words_of_their_own(words: str) -> None:
    assert private.is_out_of_memory(RuntimeError(words))
    assert not private.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


# -- copies -----------------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for streams and events of a CUDA device, and notes in which order it is asked for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.current = _Stream(self, "compute")
        names = iter(("out", "in"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(self, next(names)))
        monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    @contextlib.contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@dataclasses.dataclass
class _Stream:
    recorder: Recorder
    name: str

    def wait_stream(self, other: _Stream) -> None:
        self.recorder.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: _Event) -> None:
        self.recorder.log.append(f"{self.name} waits for an event on {event.on}")


@dataclasses.dataclass
class _Event:
    recorder: Recorder
    on: str = ""

    def record(self, stream: _Stream) -> None:
        self.on = stream.name
        self.recorder.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.recorder.log.append(f"host waits for {self.on}")


class _Target(torch.Tensor):
    recorder: Recorder

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        self.recorder.log.append(f"copy on {self.recorder.current.name}{', not waited for' if non_blocking else ''}")
        return self


def test_copies_wait_for_what_was_computed_and_run_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    streams, target = CudaStreams(CUDA), torch.empty(4).as_subclass(_Target)
    target.recorder = recorder
    event = streams.copy("out", torch.empty(4), target)
    streams.wait(event)
    streams.finish(event)
    assert recorder.log == [
        "out waits for compute", "copy on out, not waited for", "event on out", "compute waits for an event on out",
        "host waits for out",
    ]  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_the_plain_forward_reads_parameters_on_the_host_as_autocast_would(autocast: bool) -> None:
    """Autocast for the device leaves alone what is on the host."""
    weight, bias, x = torch.randn(4, 8), torch.randn(4), torch.randn(2, 8)
    given = x.bfloat16() if autocast else x
    with FetchedWhereUsed([weight, bias], torch.device("cpu")):
        found = nn.functional.linear(given, weight, bias)
    assert_same_bits(nn.functional.linear(given, weight.to(given.dtype), bias.to(given.dtype)), found)


class Watched(FakeStreams):
    """Notes which copies from the host the host has waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[Any] = []
        self.finished: list[Any] = []

    def copy(self, direction: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
        event = super().copy(direction, source, target)
        if direction == "in":
            self.fetched.append(event)
        return event

    def finish(self, event: Any) -> None:
        self.finished.append(event)
        super().finish(event)


def test_no_copy_reads_parameters_on_the_host_when_backward_returns() -> None:
    """The optimizer steps them next, on the CPU, which waits for no stream: what is fetched late would be half new."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), torch.randn(8, 32)
    plan = memplan.plan(net, x, 1.0, costs="estimate")
    memplan.apply(net, x, plan.floor_bytes * 3 // 4, host_budget="1MiB", costs="estimate")
    planned = planned_forward(net)
    assert planned is not None
    transfers = planned.steps[0].runner.store.transfers  # type: ignore[attr-defined]
    transfers._streams = streams = Watched()
    net(x).sum().backward()
    last = {id(event.source()): event for event in streams.fetched if event.source() is not None}
    parameters_read = [id(p.untyped_storage()) for p in net.parameters()]
    assert any(key in last for key in parameters_read)
    assert all(last[key] in streams.finished for key in parameters_read if key in last)


def test_no_copy_that_ops_waited_for_reads_parameters_when_forward_returns() -> None:
    """Where no backward follows, somebody may write to them next, and the device may be far behind."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), torch.randn(8, 32)
    plan = memplan.plan(net, x, 1.0, costs="estimate")
    memplan.apply(net, x, plan.floor_bytes * 3 // 4, host_budget="1MiB", costs="estimate")
    planned = planned_forward(net)
    assert planned is not None
    transfers = planned.steps[0].runner.store.transfers  # type: ignore[attr-defined]
    transfers._streams = streams = Watched()
    net(x)
    schedule, values = planned.plan.schedule, planned.plan.problem.graph.values
    forward = schedule[: schedule.index(Boundary())]
    fetches = [step.value for step in forward if isinstance(step, Prefetch) and values[step.value].fetched]
    waited = [event for event, v in zip(streams.fetched, fetches, strict=True) if Wait(v) in forward]
    assert waited and all(event in streams.finished for event in waited)


# -- the allocator ----------------------------------------------------------------------------------------------------


class Segments:
    """Stands for the settings of PyTorch's CUDA allocator. `asks`: has a function that tells them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, settings: str = "", backend: str = "native", asks: bool = True
    ) -> None:
        self.settings, self.told = settings, list[str]()
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * MIB, 100 * MIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * MIB)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self._snapshot)
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
        if asks:
            monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: self.settings, raising=False)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self._set)
        monkeypatch.setattr("memplan.torch_private.devices._maps_memory", lambda device: True)
        monkeypatch.setattr("sys.platform", "linux")
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)

    def _snapshot(self) -> dict[str, Any]:
        expands = "expandable_segments:True" in self.settings
        return {"allocator_settings": {"expandable_segments": expands, "PYTORCH_CUDA_ALLOC_CONF": self.settings}}

    def _set(self, settings: str) -> None:
        self.told.append(settings)
        self.settings = settings


@pytest.mark.parametrize("asks", [True, False], ids=["newer", "2.11"])
def test_segments_expand_before_anything_is_planned(
    asks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segments = Segments(monkeypatch, "garbage_collection_threshold:0.8", asks=asks)
    assert automatic_bytes(CUDA) == 80 * MIB, "as they will expand"
    with caplog.at_level("INFO", logger="memplan"):
        for _ in range(2):
            prepare_allocator(CUDA)
    assert segments.told == ["garbage_collection_threshold:0.8,expandable_segments:True"], "once, and beside the others"
    assert caplog.text.count("expandable_segments:True from now on") == 1
    prepare_allocator(torch.device("cpu"))


def test_without_a_budget_that_of_the_device_is_taken_where_parts_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    Segments(monkeypatch, "")
    monkeypatch.setattr("memplan.api._sharded", lambda model: SimpleNamespace(device=CUDA))  # its parts are on the host
    assert named_budget(None, nn.Linear(4, 4), None) == named_budget("auto", nn.Linear(4, 4), None) == 80 * MIB


@pytest.mark.parametrize("reason", ["settings", "environment", "backend", "platform", "driver"])
def test_a_choice_of_the_users_or_the_platforms_stays_and_costs_a_larger_reserve(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = "expandable_segments:False" if reason == "settings" else ""
    segments = Segments(monkeypatch, settings, "cudaMallocAsync" if reason == "backend" else "native")
    if reason == "environment":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    if reason == "platform":
        monkeypatch.setattr("sys.platform", "win32")
    if reason == "driver":
        monkeypatch.setattr("memplan.torch_private.devices._maps_memory", lambda device: False)
    prepare_allocator(CUDA)
    assert segments.told == []
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in caplog.text
    assert automatic_bytes(CUDA) == 65 * MIB


# -- a default device -------------------------------------------------------------------------------------------------


def test_what_is_on_the_host_stays_there_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(4, 4))], lr=torch.tensor(1e-3))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    optimizer.step()  # makes its count of steps, which is read as a number
    monkeypatch.setattr("memplan.costs.optimizer._EXAMPLE", (4, 4))
    with torch.device("meta"):
        made.append(FakeStreams().pinned(8))
        assert host_update_s_per_byte(optimizer, measured=True) > 0
        made += _example(optimizer, optimizer.param_groups[0], torch.float32).param_groups[0]["params"]
        assert optimizer_needs(optimizer, torch.device("cpu"))[0] > 0
    assert {t.device.type for t in made} == {"cpu"}


# -- bits -------------------------------------------------------------------------------------------------------------


def test_what_cuda_chooses_among_equals_is_kept() -> None:
    with private.FakeTensorMode():
        on_gpu, count = torch.empty(4, device=CUDA), torch.empty(4, dtype=torch.int64, device=CUDA)
        on_cpu = torch.empty(4)
    other = op_facts.may_give_other_bits
    for tensor in (on_gpu, count):
        assert other(aten.topk.default, (tensor, 2), {}, (tensor, count))
        assert other(aten.sort.default, (tensor,), {}, (tensor, count))
        assert other(aten.median.default, (tensor,), {}, tensor)
        assert not other(aten.sort.stable, (tensor,), {"stable": True}, (tensor, count))
        assert not other(aten.argmax.default, (tensor,), {}, count), "the first of equals, says its documentation"
    assert not other(aten.topk.default, (on_cpu, 2), {}, (on_cpu, on_cpu))


def test_what_cuda_adds_in_any_order_is_kept() -> None:
    with private.FakeTensorMode():
        on_gpu, on_cpu = torch.empty(4, device=CUDA), torch.empty(4)
        count = torch.empty(4, dtype=torch.int64, device=CUDA)
    index = torch.zeros(4, dtype=torch.int64)
    other = op_facts.may_give_other_bits
    for op, args in (
        (aten.index_add.default, (on_gpu, 0, index, on_gpu)),
        (aten.index_put.default, (on_gpu, [index], on_gpu, True)),
        (aten.cumsum.default, (on_gpu, 0)),
        (aten.scatter_add_.default, (on_gpu, 0, index, on_gpu)),
    ):
        assert other(op, args, {}, on_gpu)
        assert other(op, args, {}, on_cpu) == (op is aten.index_put.default), "which threads of a CPU do, too"
        assert not other(op, args, {}, count), "integers add up in any order"
    assert not other(aten.index_put.default, (on_gpu, [index], on_gpu), {}, on_gpu)
    assert not other(aten.mm.default, (on_gpu, on_gpu), {}, on_gpu)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert other(aten.cumsum.default, (on_gpu, 0), {}, on_gpu)
        torch.use_deterministic_algorithms(True)
        assert not other(aten.cumsum.default, (on_gpu, 0), {}, on_gpu)
    finally:
        torch.use_deterministic_algorithms(False)


# -- what the allocator has reserved ----------------------------------------------------------------------------------


def test_blocks_of_a_process_have_the_names_of_what_lies_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, affine=False)), torch.rand(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter) and weight.grad is not None
    tensors = [weight, model[1].running_mean, x, optimizer.state[weight]["momentum_buffer"], weight.grad, torch.ones(9)]
    blocks = [{"address": t.data_ptr(), "size": 32, "state": "active_allocated"} for t in tensors]  # type: ignore[union-attr, operator]
    own = {"device": 0, "segment_pool_id": (0, 0), "segment_type": "small", "is_expandable": False}
    segments = [
        {**own, "address": 1, "stream": 7, "blocks": [*blocks, {"address": 9, "size": 64, "state": "inactive"}]},
        {**own, "address": 2, "stream": 0, "is_expandable": True, "segment_type": "large", "blocks": blocks[:1]},
        {**own, "address": 3, "stream": 7, "segment_pool_id": (0, 1), "blocks": blocks},
        {**own, "address": 4, "stream": 7, "device": 1, "blocks": blocks},
        {**own, "address": 5, "stream": 7, "blocks": [{"address": 0, "size": 1 << 60, "state": "active_allocated"}]},
    ]
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    planner = Planner(model, model.forward, Settings("min", optimizer=optimizer, costs="estimate"))
    captured = or_raise(planner.capturing.capture((x,)))
    first, several, second = planner._problems._segments(captured)
    names = [
        "parameter 0.weight", "buffer 1.running_mean", "input input",
        "optimizer's state of parameter 0.weight", "gradient", "",
    ]  # fmt: skip
    assert first == Segment(0, 0, True, False, (*((32, True, name) for name in names), (64, False, "")))
    assert second == Segment(2, 2, False, True, ((32, True, "parameter 0.weight"),))
    assert several.blocks == ((1 << 60, True, ""),) and several.address == 6 * 32 + 64
