"""Facts about the autograd engine that have no public functions."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch.autograd import function as functions
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import _engine_run_backward, get_gradient_edge

from memplan.torch_private.exchanged import exchanged


def run_backward(tensors: tuple[torch.Tensor, ...], gradients: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward` without its checks of shapes, which take as long as the rest."""
    _engine_run_backward(tensors, tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


_SEEN = "memplan has seen this node"


class _Ends(torch.autograd.Function):
    """A node from which those that accumulate gradients of leaves can be seen."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device="cpu")


def formulas_of_op(function: type) -> tuple[Any, ...]:
    """What `torch.library.register_autograd` got for an op whose autograd function PyTorch has made; none of others."""
    code = inspect.unwrap(getattr(vars(function).get("backward"), "__func__", _Ends.forward))
    info = inspect.getclosurevars(code).nonlocals.get("info")
    return tuple(filter(None, (getattr(info, name, None) for name in ("_backward_fn", "_setup_context_fn"))))


def without_accumulators(leaves: Sequence[torch.Tensor]) -> list[bool]:
    """For each leaf, whether nobody holds the node that accumulates its gradient, so that no hook can be on it.

    A leaf gets a new such node each time that somebody asks for it, unless somebody still holds the one before (as
    DistributedDataParallel does, and everybody whose hook is to be called).
    """
    seen = _NodeMark()
    with torch.enable_grad():
        ends: Any = _Ends.apply(*leaves)  # type: ignore[no-untyped-call]
        for node, _ in ends.grad_fn.next_functions:
            if node is not None:
                node.metadata[_SEEN] = seen
        del ends, node
        held = weakref.ref(seen)
        del seen
        if held() is None:  # all these nodes are gone
            return [leaf.requires_grad for leaf in leaves]
        ends = _Ends.apply(*leaves)  # type: ignore[no-untyped-call]
    return [node is not None and node.metadata.pop(_SEEN, None) is None for node, _ in ends.grad_fn.next_functions]


class _NodeMark:
    """A mark in the metadata of autograd nodes, which is gone when they are."""


def engine_reaches(node: Any) -> bool:
    """Whether the backward pass in progress will run this autograd node: autograd.grad for other inputs does not."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is a leaf that autograd.grad was asked for
        return True


def backward_in_progress() -> int:
    """The number of the backward pass in progress, which no other pass has; -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def also_arrives_otherwise(parameter: torch.Tensor) -> bool:
    """Whether the backward pass in progress also hands a gradient to this parameter by autograd itself."""
    return parameter.requires_grad and engine_reaches(get_gradient_edge(parameter).node)


def backward_keeps_graph() -> bool:
    """Whether the backward pass in progress was asked to keep the graph (`retain_graph`, `create_graph`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def versions_kept(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """A context whose writes to these tensors autograd does not see. In the end they must hold what they held."""
    return _unsafe_preserve_version_counter(tuple(tensors))


Apply = Callable[[Any, tuple[Any, ...], Callable[..., Any]], Any]  # function, arguments, what applies it otherwise


def functions_applied_by(apply: Apply) -> contextlib.AbstractContextManager[None]:
    """A context in which what this thread's autograd functions give is what `apply(function, args, original)` gives.

    `Function.apply`, which users may have bound before, looks for what runs a function in the classes above it.
    """
    home, thread = functions._SingleLevelFunction, threading.get_ident()
    before = vars(home).get("apply")

    def instead(function: Any, *args: Any) -> Any:
        original = super(home, function).apply if before is None else before.__get__(None, function)
        return apply(function, args, original) if threading.get_ident() == thread else original(*args)

    return exchanged(home, apply=classmethod(instead))


def function_that_failed(error: BaseException) -> Any:
    """The autograd function in whose forward or backward an error was raised; None where it was in none.

    Of a forward, only where it was applied within `functions_applied_by`.
    """
    home = functions.BackwardCFunction
    codes = [getattr(home, name).__code__ for name in ("apply", "apply_boxed") if hasattr(home, name)]
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in walk_tb(cause.__traceback__):
            if frame.f_code in codes:
                return frame.f_locals["self"]._forward_cls
            if frame.f_code.co_name == "instead" and frame.f_code.co_filename == __file__:
                return frame.f_locals["function"]
        cause = cause.__cause__ or cause.__context__
    return None
