"""Where the parameters of one model live: decided by the first plan with a host budget, and carried out here."""

from __future__ import annotations

import torch
from torch import nn

from memplan import torch_private as private
from memplan.capture.analysis.traced import Traced
from memplan.capture.capture import Capture
from memplan.capture.ops.layout import storage_key
from memplan.capture.shards import NetworkSpeed, Shard
from memplan.errors import UnsupportedModel
from memplan.planning.homes import Movable, all_names, movables, with_homes, with_shards
from memplan.planning.settings import Settings
from memplan.plans.plan import Plan
from memplan.problem.budgets import bytes_of_limit
from memplan.problem.data import Link, Roofline
from memplan.runtime.host.arena import StepArena
from memplan.runtime.host.place import bring_states, materialise, place
from memplan.runtime.host.streams import measure_link
from memplan.runtime.host.transfers import Transfers
from memplan.runtime.host.updates import UpdatesInBackward
from memplan.runtime.program.collectives import Gathers
from memplan.runtime.program.parameters import ParameterStore
from memplan.runtime.ranks.sharded_model import ShardedModel


class Placement:
    """What all steps of one model share, beside its parameters: their homes, copies, gathers and updates.

    - host: names of the parameters that live on the host; None until a plan with a host budget has decided that.
    - host_budget: the most bytes of host memory that a step may use; None where nothing is offloaded.
    - device: where steps run; None is the model's device.
    - gathers: of sharded parameters, shared by all steps. All ranks run one schedule.
    - known_link: the speed of copies, where it was given or comes with a plan.
    - network: the speed of collectives, as ranks have measured it, or a Roofline says it.
    - updates: what updates parameters in the middle of backward.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self.host_budget = None if settings.most_on_host is None else bytes_of_limit(settings.most_on_host, 0)
        self._sharded = settings.shards if isinstance(settings.shards, ShardedModel) else None
        self._stay = settings.surroundings.keeps_parameters or (settings.shards is not None and self._sharded is None)
        self.host: frozenset[str] | None = None
        self.device = settings.target_device
        by_policy = frozenset[str]()
        if self._sharded is not None:
            self.device = self.device or self._sharded.device
            if self.host_budget is not None or (self.device is not None and self.device.type != "cpu"):
                by_policy = self._sharded.on_host
            self._stay = self._stay or bool(by_policy) or not self._sharded.movable
        if self.host_budget is not None and self._stay:
            self.host = by_policy
        elif by_policy:
            raise UnsupportedModel("CPUOffloadPolicy has parameters on the host; give host_budget=, which counts them")
        self.gathers = None if settings.shards is None else Gathers(settings.shards)
        self.updates: UpdatesInBackward | None = None
        self._counted: dict[str, nn.Parameter] | None = None
        self.known_link = settings.link
        self.network = NetworkSpeed() if self._sharded is None else self._sharded.network
        if isinstance(settings.costs, Roofline) and settings.costs.network is not None:
            self.network = NetworkSpeed.of(settings.costs.network)
        self._shared: tuple[Transfers, StepArena] | None = None  # by all steps

    @property
    def is_to_be_decided(self) -> bool:
        """Whether the first plan decides where parameters live."""
        return self.host_budget is not None and not self._stay

    @property
    def brought(self) -> frozenset[str]:
        """Names of parameters that live on the host, and that calls without a plan need brought to the device.

        The hooks of units of `fully_shard` bring theirs.
        """
        return frozenset() if self._sharded is not None else self.host or frozenset()

    def link(self, device: torch.device) -> Link:
        """The speed of the connection to host memory, measured where it is not known."""
        return self.known_link or measure_link(device)

    def take_over(self, plan: Plan) -> None:
        """Settle what a first plan decides for the later ones, from a plan that may come from elsewhere."""
        if plan.problem.link is None:
            return
        if not self._stay:
            self.decide(frozenset(v.name for v in plan.problem.graph.values if v.fetched))
        self.known_link = self.known_link or plan.problem.link
        if self.host_budget is None:  # plans for other calls may copy as much
            self.host_budget = plan.host_bytes

    def decide(self, host: frozenset[str]) -> None:
        """Let these parameters live on the host from now on."""
        self.host = host

    def movable(self, traced: Traced) -> tuple[Movable, ...]:
        """Parameters that may live on the host."""
        if not self.is_to_be_decided:
            return ()
        if self._sharded is not None:
            free = self._sharded.movable
            return tuple(m for m in movables(traced, free) if free.issuperset(m.names))
        odd = {name for name, p in self._model.named_parameters() if not private.is_ordinary(p)}  # packed weights, say
        return tuple(m for m in movables(traced) if odd.isdisjoint(m.names))

    def counted(self) -> dict[str, nn.Parameter]:
        """Parameters that the optimizer knows, by name: those that the model had when this was first called."""
        self._counted = self._counted or dict(self._model.named_parameters())
        return self._counted

    def lasting(self) -> frozenset[str]:
        """Names of frozen parameters whose copies may stay on the device between steps.

        They share no memory with parameters that are trained. Empty without keep_frozen.
        """
        if not self._settings.keep_frozen:
            return frozenset()
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        trained = {storage_key(p) for p in parameters.values() if p.requires_grad}
        return frozenset(n for n, p in parameters.items() if not p.requires_grad and storage_key(p) not in trained)

    def sharded(self) -> dict[str, Shard]:
        """The shard of each sharded parameter, by its name."""
        shards = self._settings.shards
        if shards is None:
            return {}
        return {n: shard for n, p in self._model.named_parameters() if (shard := shards.shard(p)) is not None}

    def away(self) -> list[torch.Tensor]:
        """Tensors that the model's own forward needs, and that are not on the device.

        These are parameters that live on the host. Before a plan has decided that, they are all parameters and buffers
        that are elsewhere.
        """
        if self.host is None and self.device is not None and (self.is_to_be_decided or self._sharded is not None):
            everything = (*self._model.parameters(), *self._model.buffers())
            return [t for t in everything if t.device.type != self.device.type]
        return [p for name, p in self._model.named_parameters() if name in self.brought]

    def homed(self, captured: Capture) -> Capture:
        """The capture, with each parameter's home in its graph, as far as homes are decided.

        Captures are made with homes (`Capturing`). The first plan with a host budget decides homes after its capture.
        """
        if not self.host and self._settings.shards is None:
            return captured
        sharded, lasting, host = self.sharded(), self.lasting(), self.host or frozenset()

        def homed(traced: Traced) -> Traced:
            traced = with_shards(traced, sharded) if sharded else traced
            return with_homes(traced, host, lasting) if host else traced

        changed = captured.changed(homed)
        if self._sharded is not None and (stuck := sorted(host - all_names(movables(captured.traced, host)))):
            raise UnsupportedModel(
                f"the part of {stuck[0]} is on the host, and the step writes to it, returns it, or gives it a "
                "gradient that it shares with what is on the device. Leave CPUOffloadPolicy out for its unit, or apply "
                "memplan with this call as the sample"
            )
        return changed

    def move(self, captured: Capture) -> None:
        """Move all parameters to their homes, and make those that are on the meta device."""
        settings = self._settings
        if any(t.is_meta for t in (*self._model.parameters(), *self._model.buffers())):
            if settings.init is None:
                raise UnsupportedModel(
                    "the model is on the meta device; give init=, a function of each name and tensor that fills it, or "
                    "materialise the model first"
                )
            materialise(self._model, settings.init, self.host or (), captured.traced.device, settings.optimizer)
            self._counted = None
            captured.key.moved()
        if settings.update == "backward" and self.updates is None:
            assert settings.optimizer is not None
            self.updates = UpdatesInBackward(self._model, settings.optimizer)
        if self.host is not None and self._sharded is None:
            self.device = captured.traced.device
            place(self._model, self.host, self.device, settings.optimizer)
            captured.key.moved()
        elif self._sharded is not None and not self._stay:
            self._sharded.settle(self.host or ())
            if settings.optimizer is not None:
                bring_states(settings.optimizer, set(self._model.parameters()))
            captured.key.moved()

    def let_go(self) -> None:
        """Give back the arena. The plan goes, and cycles of references may keep the rest of it for a while."""
        if self._shared is not None:
            self._shared[1].close()

    def store(self, traced: Traced) -> ParameterStore:
        """Parameters and buffers for a new step, with the copies, updates and gathers that all steps share."""
        if self._shared is None or self._shared[0].device != traced.device:
            self._shared = Transfers(traced.device), StepArena(traced.device)
        transfers, arena = self._shared
        if self.updates is not None:
            self.updates.host = {p for name, p in self._model.named_parameters() if name in (self.host or ())}
            self.updates.reads_done, self.updates.arrived = transfers.reads_done, transfers.arrived
        names = {n for n, p in self._model.named_parameters() if p.requires_grad}
        names |= {r.name for r in traced.residents.values() if r.kind in ("parameter", "buffer")}
        return ParameterStore(self._model, names, transfers, arena, self.updates, self.gathers, traced.specs)
