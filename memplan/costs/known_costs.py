"""What is known of ops that do not run: seconds by a roofline, and what earlier processes found, on disk.

Each device, thread count, torch version and choice of kernels has a file of seconds and scratch bytes of ops. A margin
of a model is a fraction: how much more than predicted its steps have been seen to hold.

Where other processes keep the machine busy, even the fastest run of an op may be slow. The figure is doubted where no
second run comes near it, or where the first step takes much less than predicted. The next process then measures again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from memplan.cache import keep, kept, only_writer
from memplan.capture.analysis.traced import Traced
from memplan.capture.key import kernel_switches
from memplan.capture.ops.island_ops import IslandKernel
from memplan.capture.shards import NetworkSpeed
from memplan.problem.data import Blocks, Costs, Roofline

_SPREAD, _SPREAD_S = 0.25, 2e-5  # repeats differ by no more, relative or in seconds, where they agree
_MOST_DOUBTS = 3  # measurements without repeats that agree; then the fastest counts
_SETTLED = -1
_FORMAT = 4  # of the file of ops
_MOST_MODELS = 1000


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What runs of an op showed.

    - time_s: seconds of the fastest run.
    - scratch_bytes: held at its peak beyond its new outputs.
    - doubts: 0 where repeats agreed. More is how often they did not: the seconds may be those of a busy machine, and
      are measured again. `_SETTLED`: they have been measured again, and count.
    - process: the one that measured doubted seconds. It goes on with them, so that its plans are alike.
    - requests: see `Costs`.
    - unsteady: a second run on the same values gave other bits.
    """

    time_s: float
    scratch_bytes: int
    doubts: int = 0
    process: int = 0
    requests: Blocks = ()
    unsteady: bool = False


@dataclass(slots=True)
class KnownCosts:
    """Facts of ops on one device.

    - name: of their file.
    - entered: ops that this process has measured since it read the file.
    """

    name: str
    facts: dict[str, OpFacts]
    entered: set[str] = field(default_factory=set)

    @staticmethod
    def read(device: torch.device) -> KnownCosts:
        """What is on disk of a device, measured with kernels that are chosen as now: cuDNN on, TF32 off, and so on."""
        switches = hashlib.sha256(repr(kernel_switches()).encode()).hexdigest()[:8]
        name = f"costs-{device_name(device)}-{switches}.json"
        return KnownCosts(name, _facts_in(name))

    def wants(self, key: str, quick: bool) -> bool:
        """Whether an op has to be measured: it is not known, or it is doubted and there is time."""
        known = self.facts.get(key)
        return known is None or (known.doubts > 0 and known.process != os.getpid() and not quick)

    def enter(
        self, key: str, times_s: Sequence[float], scratch_bytes: int, requests: Blocks, unsteady: bool = False
    ) -> None:
        """Enter the seconds of all repeats, and what else runs have shown.

        Only the fewest seconds count: other work of the machine adds to them.

        A figure that is confirmed stays as it is, so that plans which were made with it do.
        """
        before, time_s = self.facts.get(key), min(times_s)
        self.entered.add(key)
        unsteady |= before is not None and before.unsteady
        if before is not None and agree((before.time_s, time_s)):
            time_s = before.time_s
        if agree(times_s):
            self.facts[key] = OpFacts(time_s, scratch_bytes, 0 if before is None else _SETTLED, 0, requests, unsteady)
            return
        doubts = 1 if before is None else before.doubts + 1
        time_s = time_s if before is None else min(time_s, before.time_s)
        doubts = doubts if doubts < _MOST_DOUBTS else _SETTLED
        self.facts[key] = OpFacts(time_s, scratch_bytes, doubts, os.getpid(), requests, unsteady)

    def save(self) -> None:
        """Add what was entered to the file, and to what others have added. Empty ends of entries are left out."""
        with only_writer(self.name):
            merged = _facts_in(self.name) | {key: self.facts[key] for key in self.entered}
            entries = {k: astuple(f)[: 6 if f.unsteady else 5 if f.requests else 4] for k, f in sorted(merged.items())}
            keep(self.name, json.dumps({"format": _FORMAT, "facts": entries}).encode())


def agree(times_s: Sequence[float]) -> bool:
    """Whether there is nothing to doubt: of several runs a second one comes near the fastest."""
    time_s, *others = sorted(times_s)
    return not others or others[0] - time_s <= max(_SPREAD_S, _SPREAD * time_s)


def _facts_of(
    time_s: float, scratch_bytes: int, doubts: int = 0, process: int = 0, requests: Blocks = (), unsteady: bool = False
) -> OpFacts:
    """The facts of an entry on disk, which may be of an earlier version."""
    blocks = tuple((int(name), int(size_bytes)) for name, size_bytes in requests)
    return OpFacts(float(time_s), int(scratch_bytes), int(doubts), int(process), blocks, bool(unsteady))


def _facts_in(name: str) -> dict[str, OpFacts]:
    """The facts in a file; none where it is absent, damaged or of another version, for then ops are measured again."""
    try:
        content = json.loads(kept(name))
        if content["format"] != _FORMAT:
            return {}
        return {str(key): _facts_of(*entry) for key, entry in content["facts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def doubt(traced: Traced) -> None:
    """Let the next plan measure the ops of a step again, once. The step takes much less than their costs say."""
    known = KnownCosts.read(traced.device)
    for key in {op.key for op in traced.graph.ops} & known.facts.keys():
        if not known.facts[key].doubts:
            known.facts[key] = dataclasses.replace(known.facts[key], doubts=1)
            known.entered.add(key)
    known.save()


def device_name(device: torch.device) -> str:
    """A name of the hardware, the thread count and the torch version, for which measured figures hold."""
    hardware = f"{platform.machine()}-{platform.processor() or 'cpu'}-{torch.get_num_threads()}threads"
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    name = f"{device.type}-{hardware}-torch{torch.__version__}"
    return "".join(c if c.isalnum() or c in "-." else "_" for c in name)


def known_margin(model: nn.Module, device: torch.device | None = None) -> float:
    """The margin of a model on a device: 0.05 keeps 5% of a budget free. 0 where none was needed yet.

    With device=None it is the device that the model is on.
    """
    device = device or next((p.device for p in model.parameters()), None)
    if device is None or device.type == "meta":
        return 0.0
    return _margins_in(_file_of(device)).get(_digest(model), 0.0)


def remember_margin(model: nn.Module, device: torch.device, margin: float) -> None:
    """Save a margin for later runs of such a model on this device."""
    name, model_key = _file_of(device), _digest(model)
    with only_writer(name):
        margins = _margins_in(name)
        margins.pop(model_key, None)
        latest = [*margins.items(), (model_key, margin)][-_MOST_MODELS:]
        keep(name, json.dumps({"margins": dict(latest)}).encode())


def _margins_in(name: str) -> dict[str, float]:
    """Margins by model, the latest last; none where the file is absent or damaged."""
    try:
        margins = json.loads(kept(name))["margins"]
        return {str(model_key): min(1.0, max(0.0, float(margin))) for model_key, margin in margins.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _digest(model: nn.Module) -> str:
    """Equal for models of one class with equal parameters and buffers, but for what these hold."""
    tensors, kind = [*model.named_parameters(), *model.named_buffers()], type(model)
    layout = [(name, _shape(t), str(t.dtype)) for name, t in tensors]
    return hashlib.sha256(repr((kind.__module__, kind.__qualname__, layout)).encode()).hexdigest()[:32]


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    with contextlib.suppress(RuntimeError):  # lazy and nested ones have none
        return tuple(tensor.shape)
    return None


def _file_of(device: torch.device) -> str:
    return f"margin-{device_name(device)}.json"


def estimate(traced: Traced, roofline: Roofline | None = None, network: NetworkSpeed | None = None) -> Costs:
    """The longer of compute time and memory traffic time, for each op. Nothing is run; scratch counts as 0.

    Of calls that can't be traced, what their run on the sample took.
    """
    roofline, known, found = roofline or Roofline(), facts_without_runs(traced, network), list[OpFacts]()
    for op, kernel in zip(traced.graph.ops, traced.kernels, strict=True):
        traffic = sum(traced.graph.values[v].size_bytes for v in (*op.inputs, *op.outputs))
        # PyTorch's own table knows matrix products, convolutions and attention. A multiply-add is two operations.
        count, flops = flop_registry.get(getattr(kernel.target, "overloadpacket", None)), 0.0
        if count is not None:
            args, kwargs = fx.map_arg((kernel.args, kernel.kwargs), lambda n: n.meta["val"])
            flops = float(count(*args, **kwargs, out_val=kernel.node.meta["val"]))
        compute_s, traffic_s = flops / roofline.flops_per_s, traffic / roofline.bytes_per_s
        found.append(known.get(op.key) or OpFacts(roofline.launch_s + max(compute_s, traffic_s), 0))
    return Costs(tuple(f.time_s for f in found), tuple(f.scratch_bytes for f in found), "estimated")


def facts_without_runs(traced: Traced, network: NetworkSpeed | None) -> dict[str, OpFacts]:
    """What is known of ops that can't be run on made-up data, by key: islands, and collectives on this network."""
    values, network, found = traced.graph.values, network or NetworkSpeed(), dict[str, OpFacts]()
    for op, kernel in zip(traced.graph.ops, traced.kernels, strict=True):
        if isinstance(kernel.target, IslandKernel):
            found[op.key] = OpFacts(*kernel.target.cost)
        elif op.is_collective:
            whole_bytes = max(sum(values[v].size_bytes for v in side) for side in (op.inputs, op.outputs))
            found[op.key] = OpFacts(network.time_s(op.kind, whole_bytes), 0)
    return found
