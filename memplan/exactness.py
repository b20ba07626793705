"""Is a training step's own checkpointing, compilation or offload exact? It is run with and without, and compared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from memplan import torch_private as private
from memplan.capture.ops.layout import same_bits, tensor_text
from memplan.capture.trace.call import Sample
from memplan.errors import NothingToTrain
from memplan.installed.planned_forward import plans_set_aside
from memplan.planning.settings import LossFunction, Settings
from memplan.runtime.trial.recorded_step import ModulesHeard, Parts, ResultKey, StepRecord, StepStart, named_tensors

Kind = Literal["error", "output", "second run", "gradient", "input", "buffer", "parameter", "generator"]

_ORDER = get_args(Kind)
_NOISE = 10  # times as much as two equal runs differ: more is no noise of the device
_MORE = 3  # runs of a reference that two runs show not to repeat itself
_SHOWN = 12  # findings in a text


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the step that differs from the reference.

    - kind, name: what differs, for example "gradient" and "layers.0.weight". A "second run" is what a module gives
      when backward runs it again, compared with its own forward.
    - module: where it differs first: the module that owns it, or for an output the first one in forward.
    - largest: the largest difference of two numbers; infinite for NaN.
    - relative: that over the largest number of the reference.
    - count, total: how many numbers have other bits, of how many.
    - noise: the largest difference between two runs of the reference.
    - note: what else is to be said.
    """

    kind: Kind
    name: str
    module: str = ""
    largest: float = 0.0
    relative: float = 0.0
    count: int = 0
    total: int = 0
    noise: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        share = f"{self.relative:.1g} of the largest number"
        figures = f"by {self.largest:.2g} at most ({share}), {self.count} of {self.total}"
        first = f"; first in {self.module}" if self.kind == "output" and self.module else ""
        noise = f"; two equal runs differ by {self.noise:.2g}" if self.noise else ""
        return f"{self.kind:10}  {self.name}  {self.note or figures}{first}{noise}"


@dataclass(frozen=True, slots=True)
class Audit:
    """What `memplan.audit` has found.

    - findings: what differs, the earliest first: outputs, second runs, gradients in the order of backward, the rest.
    - nondeterministic: what differs no more than two runs of the reference do, so that nothing can be said of it.
    - switched_off: what the reference ran without, as ("4 checkpoints", "1 compiled call").
    - unknown: what may still run again in the reference, as autograd functions that take a function.
    - compared: how many results were compared, by kind.
    """

    findings: tuple[Finding, ...]
    nondeterministic: tuple[Finding, ...]
    switched_off: tuple[str, ...]
    unknown: tuple[str, ...]
    compared: dict[str, int]

    @property
    def exact(self) -> bool:
        """Whether all results have the same bits."""
        return not self.findings and not self.nondeterministic

    def __str__(self) -> str:
        without = f"without {', '.join(self.switched_off)}" if self.switched_off else "with nothing switched off"
        if self.exact:
            counts = ", ".join(_counted(count, kind) for kind, count in self.compared.items())
            lines = [f"exact: {counts} have the same bits {without}"]
        elif not self.findings:
            lines = [f"no fault found {without}, but the step does not repeat its own bits"]
        else:
            lines = [f"not exact: {_counted(len(self.findings), 'finding')} {without}"]
        for title, found in (("", self.findings), ("nondeterministic, also without: ", self.nondeterministic)):
            lines += [f"  {title}{one}" for one in found[:_SHOWN]]
            lines += [f"  {title}... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        lines += [f"  not switched off: {name}; give reference=" for name in self.unknown]
        return "\n".join(lines)


def audit(
    model: nn.Module,
    sample: Sample,
    loss_fn: LossFunction | None = None,
    *,
    reference: nn.Module | LossFunction | None = None,
) -> Audit:
    """Whether the model's checkpointing, compilation or saved-tensor hooks change what a training step gives.

        print(memplan.audit(model, batch))
        assert memplan.audit(model, batch).exact

    One step is run as it is, and one without them, from equal states: forward, and backward from the loss (or from all
    outputs). The reference runs no checkpoint of `torch.utils.checkpoint`, no compiled code, no hooks on saved tensors
    such as `save_on_cpu`, and no plan of memplan. Outputs, gradients of parameters and inputs, the inputs, buffers,
    parameters and generator states are compared bit by bit. The reference runs twice, and more often if it does not
    repeat itself: differences between these runs are not the fault of what is audited. If there are findings, one more
    run of the step as it is tells where they begin.

    - sample, loss_fn: as for `apply`. A loss_fn may run backward itself.
    - reference: for checkpointing that is written by hand: a module with the same parameter names, which gets the
        model's parameters and buffers, or a function that is called in place of loss_fn.

    The step has to fit into memory without them. Needs host memory for several copies of parameters and gradients.
    Parameters, buffers, gradients, Python attributes, generators and optimizers are put back.

    Raises NothingToTrain if nothing requires grad, ValueError for a reference with other parameters, and what the
    reference itself raises. An error of the step as it is becomes a finding.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    loss_fn = Settings(loss_fn=loss_fn).loss_fn  # which refuses other functions
    start, off = StepStart(model, sample), private.SwitchedOff()
    twin: nn.Module | None = None
    as_it_is = without = _called(model, loss_fn)
    if isinstance(reference, nn.Module):
        buffers = {name for name, _ in (*model.named_buffers(), *reference.named_buffers())}
        own, theirs = ({n: t.shape for n, t in named_tensors(m) if n not in buffers} for m in (model, reference))
        if strange := sorted(n for n in own.keys() | theirs.keys() if own.get(n) != theirs.get(n)):
            raise ValueError(f"the reference has other parameters than the model, or of other shapes: {strange[0]}")
        twin, without = reference, _called(reference, loss_fn)
    elif reference is not None:
        without = _called(model, reference)

    def run_reference(heard: ModulesHeard | None = None) -> StepRecord:
        nonlocal off
        with plans_set_aside(model) as plans, private.everything_saved() as off:
            off.counts["plan of memplan"] = plans
            return start.record(without, heard, twin)

    right = run_reference()
    if not right.differentiable and not any(kind == "gradient" for kind, _ in right.values):
        raise NothingToTrain("no parameter or input got a gradient from the step; there is nothing to audit")
    expected, seen = ModulesHeard(twin or model), ModulesHeard(model)
    noise = dict[ResultKey, float]()  # the largest differences of other runs of the reference from its first run
    for listener in (expected, *([None] * _MORE)):
        apart = _differences(right, run_reference(listener))
        noise |= {key: max(one.largest, noise.get(key, 0.0)) for key, one in apart.items()}
        if not noise:
            break
    try:
        record = start.record(as_it_is)
    except Exception as error:
        every = [Finding("error", type(error).__name__, note=str(error).partition("\n")[0][:200])]
    else:
        found = _differences(right, record)
        every = [dataclasses.replace(one, noise=noise.get(key, 0.0)) for key, one in found.items()]
    faults = [one for one in every if not _is_noise(one)]
    if any(one.kind != "error" for one in faults):
        with set_checkpoint_early_stop(False), contextlib.suppress(Exception):
            start.record(as_it_is, seen)
        faults = _located(faults, expected, seen)
    unknown = off.unknown | {f"{name} runs again in backward" for name, _ in expected.again}
    return Audit(
        tuple(faults),
        tuple(one for one in every if _is_noise(one)),
        tuple(_counted(count, kind) for kind, count in sorted(off.counts.items()) if count),
        tuple(sorted(unknown)),
        dict(Counter(kind for kind, _ in right.values)),
    )


def _called(model: nn.Module, loss_fn: LossFunction | None) -> Callable[..., Any]:
    return model if loss_fn is None else functools.partial(loss_fn, model)


def _counted(count: int, noun: str) -> str:
    first, space, rest = noun.partition(" of ")
    return f"{count} {first}{'' if count == 1 else 's'}{space}{rest}"


def _differences(right: StepRecord, other: StepRecord) -> dict[ResultKey, Finding]:
    """What differs from the reference, by kind."""
    result = dict[ResultKey, Finding]()
    runs_backward = not other.differentiable and any(kind == "gradient" for kind, _ in other.values)
    for key in sorted({**right.values, **other.values}, key=lambda key: _ORDER.index(key[0])):
        kind, name = key
        found = _difference(right.values.get(key), other.values.get(key))
        if found is None and name in right.differentiable - other.differentiable and not runs_backward:
            found = {"note": "requires no grad as it is"} if kind == "output" else None
        if found is not None:
            owner = name.rpartition(".")[0] if kind in ("gradient", "buffer", "parameter") else ""
            largest = {"largest": math.inf} if "note" in found else {}
            result[key] = Finding(kind, name, owner, **(largest | found))  # type: ignore[arg-type]
    return result


def _difference(right: Parts | None, other: Parts | None) -> dict[str, Any] | None:
    """Figures of a `Finding`; None where all bits are equal."""
    if right is None or other is None:
        return {"note": "is missing as it is" if other is None else "is there as it is alone"}
    texts = [", ".join(map(tensor_text, parts)) for parts in (right, other)]
    if texts[0] != texts[1]:
        return {"note": f"{texts[1]} instead of {texts[0]}"}
    if all(map(same_bits, right, other)):
        return None
    if right[0].dtype == torch.uint8:
        return {"note": "has other bits"}
    figures = [_figures(*pair) for pair in zip(right, other, strict=True) if pair[0].numel()]
    largest, scale, count = max(f[0] for f in figures), max(f[1] for f in figures), sum(f[2] for f in figures)
    relative = largest / scale if scale else math.inf
    return {"largest": largest, "relative": relative, "count": count, "total": sum(t.numel() for t in right)}


def _figures(right: torch.Tensor, other: torch.Tensor) -> tuple[float, float, int]:
    """The largest difference, the largest number of the reference, how many elements have other bits."""
    wide = torch.complex128 if right.is_complex() else torch.float64
    bits = [t.view(-1).view(torch.uint8).view(t.numel(), -1) for t in (right, other)]
    differ = (bits[0] != bits[1]).any(1).view(right.shape)
    apart = (right.to(wide) - other.to(wide)).abs().nan_to_num(math.inf, math.inf)[differ]
    largest = float(apart.max()) if apart.numel() else 0.0
    return largest, float(right.to(wide).abs().nan_to_num(0.0, 0.0).max()), int(differ.sum())


def _is_noise(found: Finding) -> bool:
    return found.noise > 0 and found.largest <= _NOISE * found.noise


def _located(faults: Sequence[Finding], expected: ModulesHeard, seen: ModulesHeard) -> list[Finding]:
    """The findings in the order in which they come about, with the modules where they begin."""
    turns, mine = Counter[str](), defaultdict[str, list[Any]](list)
    for name, bits in expected.calls:
        mine[name].append(bits)
    first, again = "", None
    given = defaultdict[str, set[Any]](set)  # by each module, in forward
    for name, bits in (*seen.calls, *seen.again):
        turns[name] += 1
        if turns[name] <= len(mine[name]):
            given[name].add(bits)
            first = first or (name if bits != mine[name][turns[name] - 1] else "")
        elif again is None and bits not in given[name]:
            again = name
    found = [dataclasses.replace(one, module=first) if one.kind == "output" else one for one in faults]
    if again is not None:
        found.append(Finding("second run", again, again, note="gives other bits than its first run"))
    order = {name: index for index, name in enumerate(expected.gradients)}
    return sorted(found, key=lambda one: (_ORDER.index(one.kind), order.get(one.name, len(order))))
