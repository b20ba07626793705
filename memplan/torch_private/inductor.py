"""Inductor: its decompositions, and compiling one functional graph without Dynamo, AOTAutograd and guards."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

CompiledCall = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # empties the list that it is given


class MemoryLayout(NamedTuple):
    """How a tensor lies in memory.

    - device: with its number, as "cuda:1".
    - offset: of its first element, in elements of its storage.
    - storage_bytes: of all that its storage holds.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    offset: int
    storage_bytes: int

    @staticmethod
    def of(tensor: torch.Tensor) -> MemoryLayout:
        return MemoryLayout(
            tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), int(tensor.storage_offset()),
            int(tensor.untyped_storage().nbytes()),
        )  # fmt: skip


def compiled_backward_repeats() -> contextlib.AbstractContextManager[Any]:
    """A context in which the backward of a compiled function runs a second time, on memory that it may have used up.

    PyTorch refuses that if the first backward of this function was one that freed its graph.
    """
    return torch._functorch.config.patch(donated_buffer=False)  # type: ignore[no-any-return]


def functional_trace(function: Callable[..., Any], layouts: Sequence[MemoryLayout]) -> fx.GraphModule:
    """A function of tensors as ops that Inductor has kernels for. layouts: of its arguments."""
    mode = FakeTensorMode()
    return _traced(function, mode, _fakes(mode, layouts))


def compiled_graph(
    function: Callable[..., Any], layouts: Sequence[MemoryLayout], donated: Collection[int], options: Mapping[str, Any]
) -> CompiledCall:
    """A functional graph compiled by Inductor.

    - layouts: of its inputs.
    - donated: positions of inputs whose memory outputs may be written to. Inductor decides which it takes.
    - options: of `torch._inductor.config`.

    Raises what Inductor and the compiler raise.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    mode = FakeTensorMode()
    fakes = _fakes(mode, layouts)
    module = _traced(function, mode, fakes)
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        # The name is part of the key of Inductor's own cache, which does not know of memory that is given away.
        node._rename(f"{'donated' if position in donated else 'read'}_{position}")
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
    return compiled.current_callable  # type: ignore[no-any-return]


def deterministic_options(device: torch.device) -> dict[str, Any]:
    """Options with which a group has the same bits in every process: those on a GPU are not to depend on timings."""
    import torch._inductor.config as inductor_config

    if device.type == "cpu":
        return {"cpp.threads": torch.get_num_threads()}
    return {"deterministic": True} if hasattr(inductor_config, "deterministic") else {}


def seed_ops() -> tuple[Any, Any]:
    """Ops of Inductor's counter-based generator, which is loaded when it is first asked for.

    - draw(count, device): seeds from PyTorch's generator.
    - uniform(shape, seed, "rand"): numbers in [0, 1), float32. Only compiled code keeps to the seed.
    """
    from torch._inductor import inductor_prims

    return inductor_prims.seeds, inductor_prims.random


def keeps_to_seed(target: Any) -> bool:
    """Whether an op makes numbers of a seed, which compiled code alone does."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.name == "prims::inductor_random"


def inductor_cache_dir() -> str:
    """Where Inductor keeps code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def missing_compiler(device: torch.device) -> str:
    """What Inductor lacks to compile for a device, and how to get it. Empty where it has all."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton (pip install triton) and a device that it knows"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler: install g++ (apt install g++, or conda install gxx), or set CXX to one"
    return ""


def _traced(function: Callable[..., Any], mode: FakeTensorMode, fakes: Sequence[torch.Tensor]) -> fx.GraphModule:
    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table(), torch.ops.aten._safe_softmax.default: _safe_softmax}
    with mode, enable_python_dispatcher():  # or scalars that decompositions make were real tensors
        return make_fx(function, decomposition_table=table)(*fakes)


def _safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Attention's softmax, which is 0 in rows of -inf: these are known by their largest.

    The same numbers as by PyTorch's own decomposition, which reads the scores once more to find such rows, so that
    Inductor can't write over them.
    """
    dtype = dtype or scores.dtype
    if not scores.numel():
        return scores.to(dtype)
    numbers = scores.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
    largest = numbers.amax(dim, keepdim=True)
    parts = torch.exp(numbers - largest)
    shares = parts / parts.sum(dim, keepdim=True)
    return torch.where(largest == -torch.inf, torch.zeros_like(shares), shares).to(dtype)


def _fakes(mode: FakeTensorMode, layouts: Sequence[MemoryLayout]) -> list[torch.Tensor]:
    with mode:
        return [torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=t.device) for t in layouts]
