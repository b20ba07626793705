"""Is a training step's own checkpointing, compilation or offload exact? It is run with and without, and compared."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from memplan import torch_private as private
from memplan.capture.ops.layout import tensor_text
from memplan.capture.trace.call import Sample
from memplan.errors import NothingToTrain
from memplan.installed.planned_forward import plans_set_aside
from memplan.planning.settings import LossFunction
from memplan.runtime.trial.recorded_step import (
    ModulesHeard,
    Parts,
    ResultKey,
    StepRecord,
    StepStart,
    named_tensors,
    same_bits,
)

Kind = Literal["error", "output", "second run", "gradient", "input", "buffer", "parameter", "generator"]

_ORDER = ("error", "output", "second run", "gradient", "input", "buffer", "parameter", "generator")
_NOISE = 10  # times as much as two equal runs differ: more is no noise of the device
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
        figures = (
            f"by {self.largest:.2g} at most ({self.relative:.1g} of the largest number), {self.count} of {self.total}"
        )
        first = f"; first in {self.module}" if self.kind == "output" and self.module else ""
        noise = f"; two equal runs differ by {self.noise:.2g}" if self.noise else ""
        return f"{self.kind:10}  {self.name}  {self.note or figures}{first}{noise}"


@dataclass(frozen=True, slots=True)
class Audit:
    """What `memplan.audit` has found.

    - findings: what differs, the earliest first: outputs, second runs, gradients in the order of backward, the rest.
    - nondeterministic: what differs no more than two runs of the reference do, so that nothing can be said of it.
    - switched_off: what the reference ran without, as ("4 checkpoints", "1 compiled call").
    - unknown: autograd functions that may run a function again, and could not be switched off.
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
        lines += [f"  not switched off: {name} takes a function; give reference=" for name in self.unknown]
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
    parameters and generator states are compared bit by bit. The reference runs twice: what differs between these two
    runs is not the fault of what is audited. If there are findings, two more runs tell where they begin.

    - sample, loss_fn: as for `apply`. A loss_fn may run backward itself.
    - reference: for checkpointing that is written by hand: a module with the same parameter names, which gets the
        model's parameters and buffers, or a function that is called in place of loss_fn.

    The step has to fit into memory without them. Needs host memory for several copies of parameters and gradients.
    Parameters, buffers, gradients, Python attributes, generators and optimizers are put back.

    Raises NothingToTrain if nothing requires grad, ValueError for a reference with other parameters, and what the
    reference itself raises. An error of the step as it is becomes a finding.
    """
    twin = reference if isinstance(reference, nn.Module) else None
    if twin is not None:
        _refuse_other_parameters(model, twin)
    as_it_is: Callable[..., Any] = model if loss_fn is None else functools.partial(loss_fn, model)
    run: Callable[..., Any] = as_it_is
    if twin is not None:
        run = twin if loss_fn is None else functools.partial(loss_fn, twin)
    elif reference is not None:
        run = functools.partial(reference, model)
    start = StepStart(model, sample)

    def plainly(heard: ModulesHeard | None = None) -> StepRecord:
        with plans_set_aside(model) as plans:
            off.counts["plan of memplan"] = plans
            return start.record(run, heard, twin)

    with private.everything_saved() as off:
        right = plainly()
    with private.everything_saved():
        noise = {place: found.largest for place, found in _differences(right, plainly())}
    if not any(kind == "gradient" for kind, _ in right.values):
        raise NothingToTrain("no parameter or input got a gradient from the step; there is nothing to audit")
    try:
        found = [
            dataclasses.replace(one, noise=noise.get(place, 0.0))
            for place, one in _differences(right, start.record(as_it_is))
        ]
    except Exception as error:
        found = [Finding("error", type(error).__name__, note=str(error).partition("\n")[0])]
    faults = [one for one in found if not _is_noise(one)]
    if any(one.kind != "error" for one in faults):
        expected, seen = ModulesHeard(twin or model), ModulesHeard(model)
        with private.everything_saved():
            plainly(expected)
        with set_checkpoint_early_stop(False):
            start.record(as_it_is, seen)
        faults = _located(faults, expected, seen)
    kinds = [kind for kind, _ in right.values]
    return Audit(
        tuple(faults),
        tuple(one for one in found if _is_noise(one)),
        tuple(_counted(count, kind) for kind, count in sorted(off.counts.items()) if count),
        tuple(sorted(off.unknown)),
        {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
    )


def _counted(count: int, noun: str) -> str:
    first, space, rest = noun.partition(" of ")
    return f"{count} {first}{'' if count == 1 else 's'}{space}{rest}"


def _refuse_other_parameters(model: nn.Module, twin: nn.Module) -> None:
    buffers = {name for name, _ in (*model.named_buffers(), *twin.named_buffers())}
    own, theirs = ({n: t.shape for n, t in named_tensors(m) if n not in buffers} for m in (model, twin))
    if own != theirs:
        strange = sorted(n for n in own.keys() | theirs.keys() if own.get(n) != theirs.get(n))
        raise ValueError(f"the reference has other parameters than the model, or of other shapes: {strange[0]}")


def _differences(right: StepRecord, other: StepRecord) -> Iterator[tuple[ResultKey, Finding]]:
    """What differs from the reference, by kind."""
    runs_backward = not other.differentiable and any(kind == "gradient" for kind, _ in other.values)
    for place in sorted({**right.values, **other.values}, key=lambda place: _ORDER.index(place[0])):
        kind, name = place
        owner = name.rpartition(".")[0] if kind in ("gradient", "buffer", "parameter") else ""
        found = _difference(right.values.get(place), other.values.get(place))
        if (
            found is None
            and kind == "output"
            and not runs_backward
            and name in right.differentiable - other.differentiable
        ):
            found = {"note": "requires no grad as it is"}
        if found is not None:
            if "note" in found:
                found |= {"largest": float("inf")}
            yield place, Finding(kind, name, owner, **found)  # type: ignore[arg-type]


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
    largest, scale = max(f[0] for f in figures), max(f[1] for f in figures)
    count = sum(f[2] for f in figures)
    relative = largest / scale if scale else float("inf")
    return {"largest": largest, "relative": relative, "count": count, "total": sum(t.numel() for t in right)}


def _figures(right: torch.Tensor, other: torch.Tensor) -> tuple[float, float, int]:
    """The largest difference, the largest number of the reference, how many elements have other bits."""
    wide = torch.complex128 if right.is_complex() else torch.float64
    bits = [t.view(-1).view(torch.uint8).view(t.numel(), -1) for t in (right, other)]
    differ = (bits[0] != bits[1]).any(1).view(right.shape)
    apart = (right.to(wide) - other.to(wide)).abs().nan_to_num(float("inf"), float("inf"))[differ]
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
