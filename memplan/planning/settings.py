"""What a user says of a training step: checked once, constant from then on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import nn

from memplan.capture.shards import Shards
from memplan.config import Config, ConfigLike, config_of
from memplan.plans.figures import Random
from memplan.problem.budgets import SMALLEST, Budget, BudgetLike, device_bytes, parsed
from memplan.problem.data import Link, Roofline, Surroundings
from memplan.runtime.host.place import Init
from memplan.runtime.host.updates import refuse_update_in_backward
from memplan.runtime.program.program import Grads

LossFunction = Callable[..., Any]
Update = Literal["step", "backward"]
CostSource = Literal["measure", "estimate"] | Roofline
Kernels = Literal["eager", "fused"]
OnInfeasible = Literal["advise", "raise", "min"]
# of arguments by name: which of their dimensions vary, and from which size to which
Dynamic = Literal["auto", "all", "never"] | Mapping[str, Mapping[int, tuple[int, int]]]


@dataclass(frozen=True)
class Settings:
    """The arguments of `memplan.apply` that say what to plan; its docstring says what each of them means.

    Fields are as given; properties are what follows from several of them. A budget of None is no limit, as for
    `explore`. Raises ValueError or TypeError for arguments that are wrong, or do not go together.
    """

    budget: BudgetLike | None = None
    loss_fn: LossFunction | None = None
    optimizer: torch.optim.Optimizer | None = None
    device: torch.device | str | None = None
    costs: CostSource = "measure"
    accumulate: bool = False
    grads: Grads = "surface"
    config: ConfigLike = None
    host_budget: int | str | None = None
    link: Link | None = None
    update: Update = "step"
    in_flight: int = 1
    shards: Shards | None = None
    surroundings: Surroundings = field(default_factory=Surroundings)
    init: Init | None = None
    keep_frozen: bool = False
    arena: bool = True
    kernels: Kernels = "eager"
    random: Random = "eager"
    dynamic: Dynamic = "auto"
    on_infeasible: OnInfeasible = "advise"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(Settings).items():
            given = getattr(self, name)
            if get_origin(hint) is Literal:
                one_of(name, given, get_args(hint))
            elif hint is bool and type(given) is not bool:
                raise TypeError(f"{name} is True or False, got {given!r}")
        self._check_kinds()
        kind = type(self.loss_fn)
        if kind.__module__ != "builtins" and kind is not functools.partial and self.loss_fn is not None:
            method = kind.__call__.__get__(self.loss_fn)  # which tells whose attributes it reads
            object.__setattr__(self, "loss_fn", method)
        if self.budget is not None:
            device_bytes(self.budget)  # a bad one is refused before anything runs
        if self.most_on_host is not None:
            if not isinstance(parsed(self.most_on_host), int):
                raise TypeError(f"host_budget is an int or a str such as '64GiB', got {self.most_on_host!r}")
            if self.wants_least:
                raise ValueError("budget='min' is without host_budget=: with it, the least is where all is on the host")
        _ = self.search, self.target_device  # raise where the arguments are wrong
        if type(self.in_flight) is not int or self.in_flight < 1:
            raise ValueError(f"in_flight is a count of forwards, 1 or more, got {self.in_flight!r}")
        if self.in_flight > 1 and self.keep_frozen:
            raise ValueError("keep_frozen= is for one forward in flight; with in_flight= leave it out")
        link = self.link
        if link is not None and not isinstance(link, Link):
            raise TypeError(f"link is a memplan.Link(to_host_bytes_per_s, to_device_bytes_per_s), got {link!r}")
        if link is not None and (min(link.to_host_bytes_per_s, link.to_device_bytes_per_s) <= 0 or link.latency_s < 0):
            raise ValueError(f"a link copies more than 0 bytes a second, and takes no less than 0 s more, got {link!r}")
        if self.random == "counter" and self.kernels == "eager":
            raise ValueError("random='counter' has masks made within fused groups: give kernels='fused' too")
        self._check_dynamic()
        if self.update == "backward":
            refuse_update_in_backward(self.optimizer, self.accumulate or self.in_flight > 1, self.grads)
        if self.shards is not None and self.grads == "edges":
            raise ValueError(
                'grads="edges" gives all gradients at the end of backward, and those of sharded parameters are handed '
                'over one by one. Use grads="surface" with shards='
            )
        if self.shards is not None and self.keep_frozen:
            raise ValueError("keep_frozen= is for parameters that live on the host, and sharded ones do not")
        for name, given in (("update='backward'", self.update == "backward"), ("in_flight=", self.in_flight > 1)):
            if self.shards is not None and given:
                raise ValueError(f"{name} is not for sharded parameters")

    @cached_property
    def search(self) -> Config:
        """How plans are looked for."""
        return config_of(self.config)

    @cached_property
    def target_device(self) -> torch.device | None:
        """The device to plan for; None is the model's. A CUDA device without a number is the current one."""
        try:
            found = None if self.device is None else torch.device(self.device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device is 'cpu', 'cuda', 'cuda:0' or the like, got {self.device!r}") from None
        if found is None or found.type != "cuda":
            return found
        if not torch.cuda.is_available():
            raise ValueError(
                f"device={self.device!r}, but PyTorch finds no CUDA device here. To see what a plan for one would come "
                'to, give device="cpu" and costs=memplan.Roofline(...) with its speed'
            )
        return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the CUDA device that a plan made on the CPU is for; None where it is for none."""
        return self.costs.capability if isinstance(self.costs, Roofline) else None

    @property
    def wants_least(self) -> bool:
        """Whether the budget is "min", however it is spelt."""
        return isinstance(self.budget, str) and parsed(self.budget) == SMALLEST

    @property
    def most_on_host(self) -> int | str | None:
        """The host budget, which may also be given within the budget. None: nothing is offloaded."""
        within = self.budget.host if isinstance(self.budget, Budget) else None
        return within if self.host_budget is None else self.host_budget

    @property
    def takes_any_size(self) -> bool:
        """Whether one plan may serve calls of many sizes."""
        return self.dynamic != "never" and self.kernels == "eager" and self.shards is None and self.update == "step"

    def _check_kinds(self) -> None:
        for name in ("loss_fn", "init"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} is a function, got {getattr(self, name)!r}")
        if isinstance(self.loss_fn, nn.modules.loss._Loss):
            kind = type(self.loss_fn).__name__
            raise TypeError(
                f"loss_fn is called with the model and the sample, as {kind} is not. Give for example "
                f"loss_fn=lambda model, x, y: criterion(model(x), y), where criterion is the {kind}"
            )
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise TypeError(f"optimizer is a torch.optim.Optimizer, got {self.optimizer!r}")
        if self.shards is not None and not hasattr(self.shards, "tracing"):
            raise TypeError(f"shards is a memplan.Shards, got {self.shards!r}")
        if not isinstance(self.surroundings, Surroundings):
            raise TypeError(f"surroundings is a memplan.Surroundings, got {self.surroundings!r}")
        if min(self.surroundings.held_bytes, self.surroundings.after_bytes) < 0:
            raise ValueError(f"surroundings hold no less than 0 bytes, got {self.surroundings!r}")
        if isinstance(self.costs, Roofline):
            if min(self.costs.flops_per_s, self.costs.bytes_per_s) <= 0 or self.costs.launch_s < 0:
                raise ValueError(f"a Roofline does more than 0 flops and bytes a second, got {self.costs!r}")
        else:
            one_of("costs", self.costs, ("measure", "estimate"))

    def _check_dynamic(self) -> None:
        if isinstance(self.dynamic, str) and self.dynamic not in ("auto", "all", "never"):
            raise ValueError(f"dynamic must be 'auto', 'all', 'never' or a dict, got {self.dynamic!r}")
        if not isinstance(self.dynamic, (str, Mapping)):
            raise TypeError(f"dynamic is 'auto', 'all', 'never' or a dict, got {self.dynamic!r}")
        for name, ranges in self.dynamic.items() if isinstance(self.dynamic, Mapping) else ():
            if not isinstance(ranges, Mapping):
                raise TypeError(f"dynamic={{{name!r}: {{dimension: (least, most)}}}}, got {ranges!r}")
            for index, bounds in ranges.items():
                if not isinstance(bounds, Sequence) or len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                    raise ValueError(f"dynamic={{{name!r}: {{{index}: (least, most)}}}}, got {bounds!r}")
        if self.dynamic not in ("auto", "never") and not self.takes_any_size:
            raise ValueError(
                "dynamic= is for eager kernels, whole parameters and update='step'; leave it out, and each size gets a "
                "plan of its own"
            )


def one_of(name: str, given: Any, words: Sequence[str]) -> None:
    """Raise ValueError for an argument that is none of the words that it may be."""
    if given not in words:
        raise ValueError(f"{name} must be {', '.join(map(repr, words[:-1]))} or {words[-1]!r}, got {given!r}")
