"""Find the parts of a step, and capture each that can be, as it stands in the step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from memplan.capture.capture import capture_part
from memplan.capture.probe import Site, find_sites
from memplan.capture.trace.raw_trace import PartSurroundings
from memplan.errors import MemplanError, UnsupportedModel
from memplan.planning.parts.part import Part
from memplan.planning.parts.request import PartsRequest
from memplan.runtime.parts.rehearsal import Rehearsal, nothing_kept

Sites = dict[nn.Module, Site]


def found_sites(request: PartsRequest) -> tuple[Sites, Sites]:
    """The units to plan, and the blocks that have units in them, as a forward shows them."""
    call, reason = request.call, request.reason
    try:
        with nothing_kept(request.model, call), torch.enable_grad():
            run = functools.partial(request.forward, *call.variadic, **call.arguments)
            return find_sites(request.model, run, reason, request.decides, request.unsteady)
    except MemplanError:
        raise
    except Exception as error:  # the plain forward does not run either
        raise UnsupportedModel(f"{reason}\n  and the plain forward fails: {type(error).__name__}: {error}") from error


def captured_units(request: PartsRequest, rehearse: Callable[..., Rehearsal], sites: Sites) -> list[Part]:
    """The calls of units in a forward, in order. Each is captured where its gradients can stay the same bits."""
    if not sites:
        raise UnsupportedModel(f"no part of the model can be planned either. {request.reason}")
    rehearsal = rehearse(metered=False)
    rehearsal.run(dict.fromkeys(sites, ()))
    calls = Counter(visit.module for visit in rehearsal.visits)
    units = [Part(visit.module, sites[visit.module], visit, fuse=request.fuse) for visit in rehearsal.visits]
    for unit in units:
        capture_unit(unit, calls[unit.module] > 1 or shares_parameters(request.model, unit.module))
    return units


def capture_unit(unit: Part, shares: bool) -> None:
    """Capture a unit for the gradients that reach it, or mark it opaque where a program would change bits.

    shares: it shares parameters with other calls.
    """
    visit, site = unit.visit, unit.site
    unit.captured, unit.shares = None, shares
    if site.kind != "captured" or visit is None:
        return
    autocast = visit.call.autocast
    around = PartSurroundings(visit.tangents, visit.uses, site.answers)
    try:
        if not visit.tangents:
            raise UnsupportedModel("no gradient reaches its results by themselves")
        if visit.twice:
            raise UnsupportedModel("it takes one tensor as two arguments")
        if visit.edited:
            raise UnsupportedModel("forward writes to its results later on")
        if shares and autocast.enabled and autocast.cache_enabled:
            raise UnsupportedModel("it shares parameters, whose casts autocast shares too")
        with autocast.context():
            captured = capture_part(unit.module, unit.module.forward, visit.call.sample(), around)
            unit.captured = captured if unit.fuse is None else captured.changed(unit.fuse)
    except UnsupportedModel as error:
        unit.give_up(str(error))
        return
    unit.further = tuple(position for position, _ in around.further_uses())


def shares_parameters(model: nn.Module, unit: nn.Module) -> bool:
    """Whether modules outside of the unit have some of its parameters too."""
    inside = set(unit.modules())
    outside = {id(p) for m in model.modules() if m not in inside for p in m._parameters.values() if p is not None}
    return any(id(p) in outside for p in unit.parameters())
