"""A first run of a program, in which every result is compared with the traced one.

Where ops are measured, that makes the same comparison. This is for programs whose ops were not run here before. A fake
kernel that is wrong about strides would otherwise lead to other kernels further on, and so to other bits.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from memplan.capture.ops.layout import strides_that_matter
from memplan.capture.ops.real_results import Facts, OtherResults, call_of, can_be_noted, facts_of
from memplan.capture.ops.sizes import Numbers, Sizes
from memplan.errors import UnsupportedModel

TRACED = "traced"  # under this name a node's metadata has the node of the trace whose op it runs


def run_checked(
    program: fx.GraphModule, arguments: list[Any], sizes: Sizes | None = None, numbers: Numbers = ()
) -> Any:
    """Run a boxed program op by op, comparing each result with the traced one.

    sizes, numbers: those of the step and of this run, where sizes vary. Raises OtherResults where a result is another
    than was traced, UnsupportedModel where it could not be traced.
    """
    return _Checked(program, sizes, numbers).boxed_run(arguments)


class _Checked(fx.Interpreter):
    def __init__(self, program: fx.GraphModule, sizes: Sizes | None, numbers: Numbers) -> None:
        super().__init__(program)
        self._sizes, self._numbers = sizes, numbers

    def _traced_facts(self, traced: fx.Node) -> Facts:
        """Facts of the traced results, at the sizes of this run."""
        facts = facts_of(traced.meta["val"])
        layouts = None if self._sizes is None else self._sizes.results.get(traced.name)
        if layouts is None:
            return facts
        at_sizes = [None if layout is None else layout.at(self._numbers) for layout in layouts]
        return tuple(
            fact
            if fact is None or at is None
            else fact._replace(shape=at.shape, stride=at.stride, size_bytes=at.memory_bytes)
            for fact, at in zip(facts, at_sizes, strict=True)
        )

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if TRACED in n.meta:
            traced = n.meta[TRACED]
            facts = self._traced_facts(traced)
            expected = _looks(facts, traced)
            found = [look if known else None for look, known in zip(_looks(facts_of(result), traced), expected)]
            if found != expected:
                message = (
                    f"{n.name} ({n.target}) gives {found} (dtype, shape, strides), where the trace has {expected}: "
                    "PyTorch's fake kernel for it is wrong, and the plan is too"
                )
                if not can_be_noted(facts, facts_of(result)):
                    raise UnsupportedModel(message)
                error = OtherResults(
                    f"{message}. Plan again; what it gives is noted", {call_of(traced): facts_of(result)}
                )
                error.note()
                raise error
        return result if n.users or n.op == "output" else None  # the interpreter would hold it to the end


def _looks(facts: Facts, traced: fx.Node) -> list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None]:
    """Properties of each result on which the kernels of later ops may depend.

    Strides of dimensions of one element count only where an op reads the result.
    """
    return [
        None
        if t is None
        else (t.dtype, t.shape, t.stride if _is_read(traced, place) else strides_that_matter(t.shape, t.stride))
        for place, t in enumerate(facts)
    ]


def _is_read(node: fx.Node, place: int) -> bool:
    """Whether an op of the trace reads this one of the node's results."""
    if isinstance(node.meta["val"], torch.Tensor):
        return any(user.op != "output" for user in node.users)
    return any(
        user.op != "output" for one in node.users if one.target is operator.getitem and one.args[1] == place
        for user in one.users
    )  # fmt: skip
