"""A first run of a program, in which every result is compared with what the trace says of it.

Measuring an op's cost makes the same comparison; programs whose costs were estimated get it here. A fake kernel that is
wrong about strides would otherwise lead to other kernels further on, and so to other bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memplan.errors import UnsupportedModel
from memplan.graph.layout import strides_that_matter, tensors_of

TRACED = "traced"  # under this name a node's metadata has the fake results of the op that it runs


def run_checked(program: fx.GraphModule, arguments: list[Any]) -> Any:
    """Run a boxed program op by op. Raises UnsupportedModel where a result is another than was traced."""
    return _Checked(program).boxed_run(arguments)


class _Checked(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if TRACED in n.meta:
            found, expected = _facts(result), _facts(n.meta[TRACED])
            if found != expected:
                raise UnsupportedModel(
                    f"{n.name} ({n.target}) gives {found} (dtype, shape, strides), where the trace has {expected}: "
                    "PyTorch's fake kernel for it is wrong, and the plan is too. Please report it"
                )
        return result if n.users or n.op == "output" else None  # the interpreter would hold it to the end


def _facts(result: Any) -> list[tuple[Any, ...]]:
    return [
        (t.dtype, tuple(t.shape), strides_that_matter(t.shape, t.stride()))
        for t in tensors_of(result)
        if isinstance(t, torch.Tensor)
    ]
