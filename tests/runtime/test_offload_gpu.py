"""What planning/test_offload.py shows on a CPU, on a CUDA device: bits, bytes as the allocator counts them, overlap."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.costs.optimizer import most_library_bytes
from memplan.installed.planned_forward import planned_forward
from memplan.runtime.host.streams import CudaStreams
from memplan.runtime.host.transfers import Transfers
from tests.capture.test_computed_branches import Guarded, batch
from tests.planning.test_in_flight import Stage
from tests.planning.test_keep_frozen import Adapted
from tests.planning.test_update_in_backward import lora
from tests.runtime.test_offload_in_flight import one_f_one_b
from tests.support.on_gpu import ON_GPU, REAL_GPU, assert_as_plain, assert_peak_is_predicted, deterministic, to_device
from tests.support.zoo import MODELS, Sample, assert_same_bits, call, copied, loss_of

pytestmark = ON_GPU


def offloading(net: nn.Module, sample: Sample, share: float = 0.0, **options: Any) -> memplan.Plan:
    """Plan a model that is on the CPU for the device, this much above the smallest budget that copies reach there."""
    options = {"device": "cuda", "host_budget": "1GiB", **options}
    low = memplan.plan(copy.deepcopy(net).cuda(), sample, 1.0).floor_bytes
    least = memplan.plan(net, sample, 2 * low, **options).floor_bytes
    memplan.apply(net, sample, least + int(share * max(0, low - least)), **options)
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan) and plan.offloaded_bytes
    return plan


def transfers_of(net: nn.Module) -> Transfers:
    return planned_forward(net).steps[0].runner.store.transfers  # type: ignore[union-attr,no-any-return]


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "vit", "t5")), "lora"]
)
@pytest.mark.parametrize("share", [0.6, 0.0])
def test_gradients_are_the_plain_models_bits_and_peaks_are_predicted(name: str, share: float) -> None:
    net, sample = lora() if name == "lora" else MODELS[name](0)
    sample = to_device(sample)
    with deterministic():
        plain = copy.deepcopy(net).cuda()
        plan = offloading(net, sample, share)
        assert plan.peak_bytes <= plan.problem.budget_bytes
        assert_as_plain(plain, net, sample)
        del plain
        assert_peak_is_predicted(net, sample)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_the_plain_forward_finds_parameters_on_the_host(autocast: bool) -> None:
    net, sample = MODELS["gpt2"](0)
    sample = to_device(sample)
    plain = copy.deepcopy(net).cuda().eval()
    with pytest.raises(memplan.BudgetInfeasible) as caught:
        memplan.apply(net, sample, most_library_bytes(torch.device("cuda")), device="cuda", host_budget="1GiB")
    assert caught.value.floor_bytes < memplan.plan(copy.deepcopy(net).cuda(), sample, 1.0).floor_bytes
    memplan.apply(net, sample, caught.value.floor_bytes, device="cuda", host_budget="1GiB")
    assert any(p.is_pinned() for p in net.parameters())
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        assert torch.equal(call(net.eval(), sample).logits, call(plain, sample).logits)


def test_branches_that_are_computed_on_the_device() -> None:
    """Checked as the step runs; where one is another, forward is run to see which, with parameters on both sides."""
    torch.manual_seed(0)
    net = Guarded().train()
    plain = copy.deepcopy(net).cuda()
    with pytest.raises(memplan.BudgetInfeasible) as caught:
        memplan.apply(net, batch(), 1, device="cuda", host_budget="1MiB", costs="estimate")
    assert caught.value.floor_bytes is not None
    with deterministic():
        memplan.apply(net, batch(), caught.value.floor_bytes, device="cuda", host_budget="1MiB", costs="estimate")
        for scale in (1.0, 1000.0, 1.0):
            assert_as_plain(plain, net, batch(scale).cuda())
    assert any(p.is_pinned() for p in net.parameters())
    assert len(planned_forward(net).steps) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_several_forwards_in_flight_on_a_device(share: float) -> None:
    torch.manual_seed(0)
    plain = Stage().train().cuda()
    planned = copy.deepcopy(plain)
    sample = torch.randn(1 << 14, 32, device="cuda").requires_grad_()
    around = memplan.Surroundings(keeps_parameters=True)
    alone = memplan.plan(planned, sample, 1.0, in_flight=3, surroundings=around)
    free = memplan.plan(planned, sample, 1.0, in_flight=3, surroundings=around, host_budget="1GiB")
    budget = int(free.floor_bytes + share * (alone.floor_bytes - free.floor_bytes))
    memplan.apply(planned, sample, budget, in_flight=3, surroundings=around, host_budget="1GiB")
    plan = memplan.plan_of(planned)
    assert plan is not None and plan.offloaded_bytes
    found = []
    for stage in (plain, planned):
        torch.manual_seed(1)
        waiting, rows = [], []
        for kind, _ in one_f_one_b(3, 12):
            if kind == "F":
                x = torch.randn_like(sample).requires_grad_()
                waiting.append((x, stage(x)))
            else:
                x, out = waiting.pop(0)
                out.backward(torch.ones_like(out))
                rows += [copied(out), copied(x.grad)]
        found.append([*rows, [copied(p.grad) for p in stage.parameters()]])
    assert_same_bits(*found)


def test_frozen_parameters_stay_on_a_device() -> None:
    torch.manual_seed(0)
    net, sample = Adapted(256, 6), torch.randn(512, 256, device="cuda")
    library_bytes = most_library_bytes(torch.device("cuda"))
    with deterministic():
        plain = copy.deepcopy(net).cuda()
        low = memplan.plan(plain, sample, 1.0).floor_bytes
        options = {"device": "cuda", "host_budget": "1GiB", "link": memplan.Link(1e8, 1e8), "keep_frozen": True}
        budgets = [library_bytes + int(share * (low - library_bytes)) for share in (0.7, 0.8, 0.9)]
        budget = next(b for b in budgets if memplan.plan(net, sample, b, **options).staying_bytes)
        memplan.apply(net, sample, budget, **options)
        plan = memplan.plan_of(net)
        assert plan is not None and plan.staying_bytes
        for _ in range(4):
            assert_as_plain(plain, net, sample)
            for model in (plain, net):
                with torch.no_grad():
                    model.frozen[0].weight[0, 0] += 1  # type: ignore[index,operator]
        del plain
        assert_peak_is_predicted(net, sample)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "fused AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-3),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
}


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("name", [n if "W" in n else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS])
def test_every_parameter_is_stepped_wherever_it_lives(name: str, update: str) -> None:
    """The first step starts from the same gradients; later losses are near, for the CPU rounds otherwise."""
    net, sample = MODELS["gpt2"](0)
    sample, plain = to_device(sample), copy.deepcopy(net).cuda()
    start = {n: copied(p) for n, p in net.named_parameters()}
    optimizers = [OPTIMIZERS[name](list(n.parameters())) for n in (plain, net)]
    offloading(net, sample, 0.5, optimizer=optimizers[1], update=update, costs="estimate")
    assert {p.device.type for p in net.parameters()} == {"cpu", "cuda"}
    losses = []
    for model, optimizer in zip((plain, net), optimizers):
        torch.manual_seed(5)
        losses.append([])
        for _ in range(4):
            loss = loss_of(call(model, sample))
            loss.backward()
            if update == "step":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][0] == losses[1][0] and losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert not any(torch.equal(p.cpu(), start[n]) for n, p in net.named_parameters())


class Unusual(nn.Module):
    """Asks for the device of its parameters, adds one in place, multiplies two with each other, and writes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.bias, self.count = nn.Parameter(torch.randn(64)), nn.Parameter(torch.zeros(3), requires_grad=False)
        self.left, self.right = nn.Parameter(torch.randn(64, 8)), nn.Parameter(torch.randn(8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + torch.arange(64.0, device=layer.weight.device)
        x += self.bias
        if not torch.is_grad_enabled():
            self.count += 1
        return x + (self.left @ self.right)[:8]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_that_of_the_plain_model(quiet: Any, autocast: bool) -> None:
    torch.manual_seed(0)
    net, x = Unusual(), torch.randn(8, 64, device="cuda")
    plain = copy.deepcopy(net).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        offloading(net, x, costs="estimate")
        assert {p.device.type for p in (net.left, net.right, net.bias)} == {"cpu"}
        for model in (plain, net):
            model.eval()
        with quiet():
            for _ in range(2):
                assert_same_bits(plain(x), net(x))
            with memplan.fetching(net):
                assert_same_bits(plain.layers[0](x), net.layers[0](x))
        assert net.count.tolist() == [2, 2, 2]
        gradients = []
        for model in (plain, net):
            model(x).float().pow(2).sum().backward()  # in eval mode
            gradients.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
        assert_same_bits(*gradients)


def test_an_encoder_and_decoder_generate() -> None:
    net, sample = MODELS["t5"](0)
    sample, plain = to_device(sample), copy.deepcopy(net).cuda()
    offloading(net, sample, costs="estimate")
    with memplan.fetching(net):
        found = net.eval().generate(sample["input_ids"], max_new_tokens=5)  # type: ignore[operator,index,call-overload]
    assert torch.equal(found, plain.eval().generate(sample["input_ids"], max_new_tokens=5))  # type: ignore[operator,index,call-overload]


@pytest.mark.parametrize("fits", [True, False])
def test_a_trainer_evaluates_and_trains_again(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters stay on the host, and so does the plan. A model that does not fit is never moved as a whole."""
    transformers = pytest.importorskip("transformers")
    from memplan.integrations.huggingface import MemplanCallback

    found = []
    for offloads in (False, True):
        net, sample = MODELS["llama"](0)
        assert isinstance(sample, dict)
        rows = [{n: t[0] for n, t in sample.items() if isinstance(t, torch.Tensor)}] * 8
        low = memplan.plan(copy.deepcopy(net).cuda(), to_device(sample), 1.0, costs="estimate").floor_bytes
        library_bytes = most_library_bytes(torch.device("cuda"))
        given, budget = {} if fits else {"model": net}, library_bytes + int(0.8 * (low - library_bytes))
        make = functools.partial(MemplanCallback, budget, host_budget="1GiB", costs="estimate", **given)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no", seed=1,
            disable_tqdm=True, eval_strategy="no" if fits else "steps", eval_steps=1, eval_on_start=not fits,
        )  # fmt: skip
        arguments._n_gpu = min(1, arguments.n_gpu)  # several would be used through nn.DataParallel
        with monkeypatch.context() as patch:
            if offloads and not fits:
                patch.setattr(type(net), "to", _never_moved)
            trainer = transformers.Trainer(
                net, arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=[make()] if offloads else None
            )
            found.append([])
            for _ in range(2):
                found[-1].append(trainer.train().training_loss)
                found[-1].append(trainer.evaluate()["eval_loss"])
        assert {p.device.type for p in net.parameters()} == ({"cpu", "cuda"} if offloads else {"cuda"})
        trainer.save_model(str(tmp_path / "saved"))
        saved = type(net).from_pretrained(tmp_path / "saved").state_dict()
        assert_same_bits({name: tensor.cpu() for name, tensor in net.state_dict().items()}, dict(saved))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3) and found[1] == pytest.approx(found[0], rel=1e-2)


def test_accelerate_leaves_parameters_where_they_are() -> None:
    accelerate = pytest.importorskip("accelerate")
    net, sample = MODELS["llama"](0)
    sample, plain = to_device(sample), copy.deepcopy(net).cuda()
    losses: list[list[float]] = []
    for model in (plain, net):
        if model is net:
            offloading(net, sample, 0.5, costs="estimate")
        homes = [p.device for p in model.parameters()]
        accelerator = accelerate.Accelerator()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        prepared, stepping = accelerator.prepare(model, optimizer, device_placement=[False, False])
        assert [p.device for p in model.parameters()] == homes
        losses.append([])
        torch.manual_seed(5)
        for _ in range(3):
            loss = loss_of(call(prepared, sample))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            stepping.step()
            stepping.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][0] == losses[1][0] and losses[1] == pytest.approx(losses[0], rel=1e-3)


def _never_moved(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    raise AssertionError(f"the model is moved to {args}, {kwargs}")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("before", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["fused AdamW", *(pytest.param(n, marks=pytest.mark.slow) for n in ("AdamW", "ASGD"))])
def test_an_optimizer_goes_along(name: str, before: str, given: bool) -> None:
    """Its state is where the parameters are, and so are counts of steps that kernels read: with a plan and after it.
    Where it was not given to `apply`, that is so from its next step on."""
    net, sample = MODELS["gpt2"](0)
    net = net.to(before)
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    loss_of(call(net, to_device(sample, before))).backward()
    optimizer.step()
    optimizer.zero_grad()
    sample, plain = to_device(sample), copy.deepcopy(net).cuda()
    other = OPTIMIZERS[name](list(plain.parameters()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    offloading(net, sample, 0.5, optimizer=optimizer if given else None, costs="estimate")
    assert {p.device.type for p in net.parameters()} == {"cpu", "cuda"}
    losses: list[list[float]] = []
    for model, stepping in ((plain, other), (net, optimizer)):
        torch.manual_seed(5)
        losses.append([])
        for step in range(4):
            if step == 3:  # without the plan
                memplan.remove(model).cuda()
            loss = loss_of(call(model, sample))
            loss.backward()
            stepping.step()
            stepping.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][0] == losses[1][0] and losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_scaled_wherever_they_live(fused: bool) -> None:
    """A `GradScaler` finds what is infinite on the host and on the device, and divides by what it multiplied with."""
    net, sample = MODELS["gpt2"](0)
    sample, plain = to_device(sample), copy.deepcopy(net).cuda()
    with torch.autocast("cuda", torch.float16):
        offloading(net, sample, 0.5)
    found = []
    for model in (plain, net):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        torch.manual_seed(5)
        rows: list[Any] = []
        for step in range(4):
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(call(model, sample))
            scaler.scale(loss).backward()
            if step == 1:
                for parameter in model.parameters():  # of which the planned model has some on each side
                    parameter.grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
                    if parameter.device.type == "cpu":
                        break
            if not fused:
                scaler.unscale_(optimizer)
            if step == 0:
                rows.append({n: copied(p.grad.cpu()) for n, p in model.named_parameters()})  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            rows.append(scaler.get_scale())
        found.append(rows)
    assert_same_bits(*found)
    assert found[0][1:] == [2.0**10, 2.0**9, 2.0**9, 2.0**9]


def test_a_learning_rate_on_the_device_is_refused_where_it_would_be_read_too_early() -> None:
    net, sample = MODELS["gpt2"](0)
    sample = to_device(sample)
    offloading(net, sample)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True)
    loss_of(call(net, sample)).backward()
    with pytest.raises(ValueError, match="on the CPU"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    optimizer.step()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "backward", "host memory"])
def test_what_goes_wrong_in_a_step_loses_no_weight(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, sample = MODELS["gpt2"](0)
    sample, plain = to_device(sample), copy.deepcopy(net).cuda()
    with deterministic():
        offloading(net, sample)
        before, calls = copy.deepcopy(net.state_dict()), 0
        name = "pinned" if where == "host memory" else "copy"
        original = getattr(CudaStreams, name)

        def failing(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == (1 if where == "host memory" else 3):
                raise MemoryError if where == "host memory" else Interrupted
            return original(*arguments)

        loss = loss_of(call(net, sample)) if where == "backward" else None
        transfers_of(net).slabs.clear()
        with monkeypatch.context() as faulty:
            faulty.setattr(CudaStreams, name, failing)
            with pytest.raises((Interrupted, MemoryError)):
                call(net, sample) if loss is None else loss.backward()
        after = net.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[n], before[n]) for n, _ in net.named_parameters())
        net.zero_grad(set_to_none=True)
        assert_as_plain(plain, net, sample)


def test_many_steps_grow_nothing_and_two_models_do_not_meet() -> None:
    nets = []
    for seed in (0, 1):
        net, sample = MODELS["gpt2"](seed)
        sample = to_device(sample)
        offloading(net, sample)
        nets.append((net, torch.optim.AdamW(net.parameters(), lr=1e-4)))
    held = set()
    for step in range(10):
        for net, optimizer in nets:
            loss_of(call(net, sample)).backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        if step:
            held.add(torch.cuda.memory_allocated())
    assert len(held) == 1
    assert [transfers_of(net).allocations for net, _ in nets] == [1, 1]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).mean()


@REAL_GPU
def test_copies_run_beside_kernels() -> None:
    """In a profiler's trace most of the time of copies is time of kernels, too."""
    net, x = Wide(), torch.randn(8192, 4096, device="cuda")
    offloading(net, x, 0.7)
    for _ in range(3):
        net(x).backward()
    torch.cuda.synchronize()
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=cuda, acc_events=True) as profiler:
        net(x).backward()
        torch.cuda.synchronize()
    copies, kernels = [], []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            span = (event.start_ns(), event.start_ns() + event.duration_ns())
            (copies if "Memcpy" in event.name() else kernels).append(span)
    copied_ns = sum(end - start for start, end in copies)
    beside_ns = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    assert copies and beside_ns > copied_ns / 2
