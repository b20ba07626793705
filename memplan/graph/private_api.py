"""Every use of a private PyTorch or transformers name, in one place, each with what it is for.

When a new release moves something, this is the file to mend.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
)
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
READ_SCALAR = aten._local_scalar_dense.default

# Ops that write to arguments though their schema does not say so: op -> (argument indices, index of `training`).
HIDDEN_WRITES: dict[Any, tuple[tuple[int, ...], int]] = {
    aten.native_batch_norm.default: ((3, 4), 5),
    aten.cudnn_batch_norm.default: ((3, 4), 5),
    aten.miopen_batch_norm.default: ((3, 4), 5),
}

# Ops that can't be traced exactly: op -> why, and what to do.
UNPLANNABLE: dict[Any, str] = {
    aten.mkldnn_rnn_layer.default: (
        "its fake kernel does not know the size of the workspace that backward reads, and the kernel leaves it out "
        "under no_grad. Set torch.backends.mkldnn.enabled = False: recurrent layers then run as plain ops, which can "
        "be planned"
    ),
}

# Ops that read nothing of a tensor argument but its shape, strides, dtype and device.
METADATA_ONLY = frozenset(
    getattr(aten, name).default
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
    )
)  # fmt: skip

_DROPOUT_P_ARGUMENT = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "dropout_p",
    "aten::_scaled_dot_product_flash_attention": "dropout_p",
    "aten::_scaled_dot_product_efficient_attention": "dropout_p",
    "aten::_scaled_dot_product_cudnn_attention": "dropout_p",
}


def draws_random_numbers(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an aten op advances the generator.

    Fused attention is tagged random, but draws nothing without dropout.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    name = _DROPOUT_P_ARGUMENT.get(target._schema.name)
    if name is None:
        return True
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            given = kwargs.get(name, args[position] if position < len(args) else argument.default_value)
            return bool(given)
    return True


def trace_with_fakes(step: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """`make_fx` over fake copies of `args`: the aten ops that eager would run, in order, at no memory."""
    return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def tracer_graph() -> torch.fx.Graph:
    """The graph that the trace in progress is writing."""
    mode = get_proxy_mode()
    assert mode is not None, "no trace in progress"
    graph = mode.tracer.graph
    assert isinstance(graph, torch.fx.Graph)
    return graph


def tracer_node(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that made `tensor` in the trace in progress; None for a tensor from outside."""
    mode = get_proxy_mode()
    assert mode is not None, "no trace in progress"
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


@contextlib.contextmanager
def not_tracing_for_transformers() -> Iterator[None]:
    """Let transformers take the path that it takes when nobody traces.

    It asks `is_tracing(tensor)`, true for fake tensors, and then builds other masks and repeats key/value heads: other
    kernels and other bits than the plain step.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        yield
        return
    module.is_fake_tensor = lambda tensor: False  # type: ignore[union-attr]
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[union-attr]


def foreign_hooks(table: dict[int, Any]) -> int:
    """Number of hooks in a module's table that are not part of the model's own forward.

    transformers installs hooks in a model's first forward that collect hidden states for its output; a trace has what
    they do in it.
    """
    return sum(getattr(h, "__module__", "") != "transformers.utils.output_capturing" for h in table.values())


def boxed(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Let the graph's code take one list and empty it, so that the caller keeps nothing alive."""
    graph.set_codegen(_BoxedCodeGen())
    return graph


def tracer_constants() -> Any:
    """The object whose attributes are the constants of the trace in progress."""
    mode = get_proxy_mode()
    assert mode is not None, "no trace in progress"
    assert isinstance(mode.tracer, PythonKeyTracer)
    return mode.tracer.root


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Run real ops in the middle of a trace: no proxy, fake or other dispatch mode sees them."""
    with _disable_current_modes():
        yield


# Normalisation ops whose fake kernels give the statistics the input's dtype, where the real ones keep float32 weights'
# dtype: op -> indices of weight, bias and running statistics.
_STATISTICS: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm.default: (2, 3),
    aten.native_batch_norm.default: (1, 2, 3, 4),
    aten.native_group_norm.default: (1, 2),
}


def corrected_outputs(func: Any, args: tuple[Any, ...], outputs: Any) -> Any:
    """The outputs of a fake op, with the dtypes that the real CPU kernel gives them.

    Corrected, over a low-precision input with float32 parameters: the statistics of batch, layer and group norm, and
    the gradient of group norm's input.
    """
    if func is aten.native_group_norm_backward.default and args[0].device.type == "cpu":
        first = outputs[0]
        wrong = first is not None and first.dtype != args[1].dtype
        return (_retyped(first, args[1].dtype), *outputs[1:]) if wrong else outputs
    parameters = _STATISTICS.get(func)
    if parameters is None or args[0].device.type != "cpu":
        return outputs
    dtypes = {args[i].dtype for i in parameters if i < len(args) and isinstance(args[i], torch.Tensor)}
    if dtypes != {torch.float32} or args[0].dtype == torch.float32:
        return outputs
    return (outputs[0], *(_retyped(t, torch.float32) for t in outputs[1:]))


def _retyped(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same node's result with another dtype."""
    mode = get_proxy_mode()
    if mode is None:
        return tensor.to(dtype)
    slot = get_proxy_slot(tensor, mode.tracer)
    with disable_proxy_modes_tracing():
        fixed = tensor.to(dtype)
        node = slot.proxy.node
        node.meta["val"] = fixed.detach()
        several, index = node.args
        assert isinstance(several, torch.fx.Node)
        assert isinstance(index, int)
        results = list(several.meta["val"])
        results[index] = node.meta["val"]
        several.meta["val"] = tuple(results)
    set_proxy_slot(fixed, mode.tracer, slot)
    return fixed


def has_symbolic_shape(outputs: Any) -> bool:
    """Whether the size of a fake result is not known until it is computed."""
    tensors = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return any(isinstance(n, torch.SymInt) for t in tensors if isinstance(t, torch.Tensor) for n in t.shape)


@contextlib.contextmanager
def seeding_refused(refuse: Callable[..., None]) -> Iterator[None]:
    """Call `refuse` where somebody seeds the default generators or sets their state."""
    homes = [
        (module, name)
        for module in (torch, torch.random)
        for name in ("manual_seed", "seed", "set_rng_state")
        if hasattr(module, name)
    ]
    originals = [getattr(module, name) for module, name in homes]
    for module, name in homes:
        setattr(module, name, refuse)
    try:
        yield
    finally:
        for (module, name), original in zip(homes, originals, strict=True):
            setattr(module, name, original)


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's start and stop lines, which its C++ part writes to standard error, off the terminal."""
    sys.stderr.flush()
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def run_backward(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward` less its checks of shapes, which take as long as the rest."""
    _engine_run_backward(
        tuple(tensors), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def engine_reaches(node: Any) -> bool:
    """Whether the backward pass in progress will run this autograd node: autograd.grad for other inputs does not."""
    return bool(torch._C._will_engine_execute_node(node))


def backward_keeps_graph() -> bool:
    """Whether the backward pass in progress was asked to keep the graph (`retain_graph`, `create_graph`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
