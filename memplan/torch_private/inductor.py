"""Inductor: its decompositions, and compiling one functional graph without Dynamo, AOTAutograd and guards."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

CompiledCall = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # empties the list that it is given


def functional_trace(function: Callable[..., Any], layouts: Sequence[torch.Tensor]) -> fx.GraphModule:
    """A function of tensors as ops that Inductor has kernels for. layouts: fake tensors like its arguments."""
    mode = FakeTensorMode()
    return _traced(function, mode, _fakes(mode, layouts))


def compiled_graph(
    graph: fx.Graph, layouts: Sequence[torch.Tensor], donated: Sequence[int], options: Mapping[str, Any]
) -> CompiledCall:
    """A functional graph compiled by Inductor.

    - layouts: fake tensors like its inputs.
    - donated: positions of inputs whose memory outputs may be written to. Inductor decides which it takes.
    - options: of `torch._inductor.config`.

    Raises whatever Inductor and the compiler raise.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    mode = FakeTensorMode()
    fakes = _fakes(mode, layouts)
    module = _traced(fx.GraphModule({}, graph), mode, fakes)
    with torch.no_grad(), inductor_config.patch(dict(options)):
        with V.set_fake_mode(mode), mode:
            module = joint_graph_passes(module)
        (returned,) = (node for node in module.graph.nodes if node.op == "output")
        returned.meta["user_visible_output_idxs"] = list(range(len(returned.args[0])))  # keeps their strides
        context = torch._guards.TracingContext(mode)
        context.fw_metadata = types.SimpleNamespace(  # type: ignore[assignment]
            bw_donated_idxs=sorted(donated), static_input_indices=[]
        )
        with torch._guards.tracing(context if donated else None):
            compiled: Any = compile_fx_inner(module, fakes, is_inference=False, is_backward=bool(donated))
    call: CompiledCall = compiled.current_callable
    return call


def _traced(function: Callable[..., Any], mode: FakeTensorMode, fakes: Sequence[torch.Tensor]) -> fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table

    with mode, enable_python_dispatcher():  # or scalars that decompositions make were real tensors
        return make_fx(function, decomposition_table=select_decomp_table())(*fakes)


def _fakes(mode: FakeTensorMode, layouts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with mode:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in layouts]
