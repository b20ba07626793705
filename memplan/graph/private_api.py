"""Every use of a private PyTorch or transformers name, in one place, each with what it is for.

When a new release moves something, this is the file to mend.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from torch import _meta_registrations
from torch._C import DispatchKey, DispatchKeySet, _get_function_stack_at, _len_torch_function_stack
from torch._compile import _disable_dynamo
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.amp.grad_scaler import _MultiDeviceReplicator
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _foreach_supported_types as _STEPPED_AT_ONCE
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Traces exchange functions of torch and transformers for as long as they take; one thread at a time may do so.
TRACING = threading.RLock()

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
READ_SCALAR = aten._local_scalar_dense.default
READ_DEVICE = torch.ops.prim.device.default

# Nobody reads which torch functions the ops come from, and to note it takes a mode that each of them goes through.
_LEAN: dict[str, Any] = {
    name: True for name in ("_disable_torch_fn_metadata_mode",) if name in inspect.signature(make_fx).parameters
}


@functools.cache
def _first_trace() -> None:
    """Trace a little in a thread that never ends: PyTorch 2.10 and 2.11 crash once that of their first trace has."""
    if torch.__version__ >= "2.12" or threading.current_thread() is threading.main_thread():
        return

    def trace() -> None:
        make_fx(torch.sin, tracing_mode="fake")(torch.ones(1))
        traced.set()
        threading.Event().wait()

    traced = threading.Event()
    threading.Thread(target=trace, daemon=True, name="memplan: first trace").start()
    traced.wait()


def trace_with_fakes(step: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """`make_fx` over fake copies of `args`: the aten ops that eager would run, in order, at no memory."""
    _first_trace()
    with _grouped_products_of_any_dtype(), _without_code():
        return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True, **_LEAN)(*args)


@contextlib.contextmanager
def _without_code() -> Iterator[None]:
    """Have no Python code made for the graph of a trace, which is read and never run."""
    with _use_lazy_graph_module(True):
        yield


def fakes_on(
    device: torch.device, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Fake tensors on a device, in the layout of parameters and buffers that are elsewhere, and fakes of the inputs.

    `make_fx` takes over the mode that they belong to, which is set as it would set its own.
    """
    mode = FakeTensorMode(
        allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
    )
    with mode:
        moved = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in state]
    return moved, [mode.from_tensor(t, static_shapes=True) for t in inputs]


@contextlib.contextmanager
def _grouped_products_of_any_dtype() -> Iterator[None]:
    """Let the fake kernel of grouped matrix products (experts) take what the real one takes.

    PyTorch's refuses all but bfloat16, and pads rows to 16 bytes in builds with CUDA only; the real kernel always does.
    """
    original = getattr(_meta_registrations, "_meta_grouped_mm_common", None)

    def fake(mat_a: torch.Tensor, mat_b: torch.Tensor, **options: Any) -> Any:
        if options["scale_a"] is not None:
            return original(mat_a, mat_b, **options)  # type: ignore[misc]
        return _grouped_product(mat_a, mat_b, options["offs"], options["out_dtype"])

    if original is None:
        yield
        return
    _meta_registrations._meta_grouped_mm_common = fake  # type: ignore[assignment]
    try:
        yield
    finally:
        _meta_registrations._meta_grouped_mm_common = original


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """An empty result of a grouped product: groups are slices of rows, or of the dimension that is summed over."""
    dtype = dtype or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    padded = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if a.dim() != b.dim():
        return a.new_empty_strided((rows, columns), (padded, 1), dtype=dtype)
    groups = a.shape[0] if a.dim() == 3 or offsets is None else offsets.shape[0]
    return a.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype)


# A dispatch key that is looked at before any other where a thread asks for it, and that nothing but a test of PyTorch
# uses: it lets a composite op be seen wherever it is called from, before autocast and autograd.
_FIRST_KEY = "TESTING_ONLY_GenericMode"


class InPlaceOf:
    """Functions that run in place of aten ops, in a thread for as long as it says so.

    functions: by the op's name, with its overload if that is not the default one. What they call is not exchanged.
    """

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self._key = torch._C._dispatch_key_parse(_FIRST_KEY)
        self._all, self._aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        self._all.fallback(torch.library.fallthrough_kernel, _FIRST_KEY)
        for name, function in functions.items():
            self._aten.impl(name, self._once(function), _FIRST_KEY)

    def _once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        keys = torch._C.DispatchKeySet(self._key)

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Where the functions run in place of the ops."""
        for operator_on_functions in tuple(torch._ops._higher_order_ops.values()):
            operator_on_functions.fallthrough(self._key)
        with torch._C._IncludeDispatchKeyGuard(self._key):
            yield


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch.func's own (vmap, grad), for which ops take other paths in eager too."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


_ORDINARY = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_ORDINARY_FUNCTIONS = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass but PyTorch's own for parameters and buffers."""
    return type(tensor) in _ORDINARY


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor in the same memory, of no subclass but of those that ops see (fake tensors)."""
    with torch._C.DisableTorchFunctionSubclass():
        detached = tensor.detach()
        if type(detached).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            return detached
        return detached.as_subclass(torch.Tensor)


def changes_ops(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class has a say in what ops on it do."""
    kind: Any = type(tensor)
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    return function not in _ORDINARY_FUNCTIONS or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def someone_traces() -> bool:
    """Whether forward runs for torch.func, forward-mode differentiation or a tracer (export, jit, make_fx)."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
    )


uncompiled = _disable_dynamo  # a decorator: torch.compile leaves such a function as it is, and goes on around it


def is_call_of_compiled_code(error: BaseException) -> bool:
    """Whether a trace has ended because it came to a function that went through torch.compile."""
    return isinstance(error, RuntimeError) and "dynamo-optimized function" in str(error)


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Where ops take their arguments as they are, on any device."""
    return torch._C._DisableAutocast()


def function_modes() -> tuple[str, ...]:
    """Names of the TorchFunctionModes that are on. A default device is none of concern: devices are in the trace."""
    kinds = [type(_get_function_stack_at(i)) for i in range(_len_torch_function_stack())]
    return tuple(kind.__qualname__ for kind in kinds if kind is not DeviceContext)


_PUT_ASIDE = threading.local()


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Where Python functions of torch run past TorchFunctionModes, as ops do: what those change is in the trace."""
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    before, _PUT_ASIDE.modes = getattr(_PUT_ASIDE, "modes", ()), modes
    try:
        yield
    finally:
        _PUT_ASIDE.modes = before
        for mode in reversed(modes):
            _push_mode(mode)


def with_function_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Of a function that programs call and that runs the code of others, which finds the modes that are put aside."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        modes = getattr(_PUT_ASIDE, "modes", ())
        for mode in reversed(modes):
            _push_mode(mode)
        try:
            return function(*args, **kwargs)
        finally:
            for _ in modes:
                _pop_mode()

    return call


def autocast_knows(op: str, device_type: str) -> bool:
    """Whether autocast has an opinion on an op of aten."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", f"Autocast{device_type.upper()}")


_OPS = torch.library.Library("memplan", "DEF")
_OPS.define("sum_of_weights(Tensor weight, Tensor target, int ignore_index) -> Tensor")


def sum_of_weights(weight: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The sum of the weights of all targets that are not ignored.

    One op in a trace, for what it holds in between has a shape that depends on data.
    """
    result: torch.Tensor = torch.ops.memplan.sum_of_weights.default(weight, target, ignore_index)
    return result


def _sum_of_weights(weight: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Its scratch is always that of a batch in which nothing is ignored."""
    indices, weights = target.new_empty(target.numel()), weight.new_empty(target.numel())
    chosen = torch.masked_select(target, target != ignore_index, out=indices[:0])
    return torch.gather(weight, 0, chosen, out=weights[:0]).sum()


for _key in ("CPU", "CUDA"):
    _OPS.impl("sum_of_weights", _sum_of_weights, _key)
_OPS.impl("sum_of_weights", lambda weight, target, ignore_index: weight.new_empty(()), "Meta")


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


class Recording:
    """The trace in progress, to write to it what `make_fx` would."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None, "no trace in progress"
        self._tracer = mode.tracer
        self._fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._fake_mode.cache_enabled = False  # whoever remembers ops himself asks for each of them once

    @property
    def length(self) -> int:
        """The number of nodes so far."""
        return len(self._tracer.graph.nodes)

    def node(self, tensor: Any) -> torch.fx.Node | None:
        """The node that made a fake tensor; None for any other, and for one whose data is known."""
        if type(tensor) is not FakeTensor or tensor.constant is not None:
            return None
        slot = get_proxy_slot(tensor, self._tracer, None)
        return None if slot is None or slot.constant is not None else slot.proxy.node

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Node:
        """A new node, under the name that it gets from `make_fx`."""
        graph = self._tracer.graph
        named = func.overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else func.__name__
        return graph.create_node("call_function", func, args, kwargs, name=graph._target_to_str(named))

    def bind(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        """Let `node` stand for the tensor from now on."""
        set_proxy_slot(tensor, self._tracer, _ProxyTensor(torch.fx.Proxy(node, self._tracer), None))

    def fake(self, contents: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor in the memory, and with the layout, of one on the meta device."""
        return FakeTensor(self._fake_mode, contents, device)


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
    owner = threading.get_ident()
    module.is_fake_tensor = (  # type: ignore[union-attr]
        lambda tensor: original(tensor) if threading.get_ident() != owner else False
    )
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[union-attr]


def global_hook_tables() -> list[dict[int, Any]]:
    """Hooks that every module runs."""
    home = torch.nn.modules.module
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return [getattr(home, f"_global_{kind}") for kind in kinds]


def foreign_hooks(table: dict[int, Any]) -> int:
    """Number of hooks in a module's table whose work is not part of a trace."""
    return sum(not _is_traced(hook) for hook in table.values())


def _is_traced(hook: Any) -> bool:
    """Whether a trace has in it what a hook does.

    transformers installs hooks in a model's first forward that collect hidden states for its output, and a hook that
    makes the output of embeddings require grad (`enable_input_require_grads`). A trace of another thread has its own.
    """
    home, name = str(getattr(hook, "__module__", "")), str(getattr(hook, "__qualname__", ""))
    return home in ("transformers.utils.output_capturing", "memplan.graph.trace") or name.endswith(_REQUIRES_GRADS)


_REQUIRES_GRADS = ".enable_input_require_grads.<locals>.make_inputs_require_grads"


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


_LAZY = functools.reduce(
    operator.or_, map(DispatchKeySet, (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor))
)


def run_in_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an op in the handler of a dispatch mode as it runs without the mode.

    A thread in such a handler leaves out the keys that resolve lazy conjugates and negatives. Kernels that make some of
    complex tensors and go on with them, as `linalg_pinv` does, would give wrong numbers.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _LAZY):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Run real ops in the middle of a trace: no proxy, fake or other dispatch mode sees them."""
    with _disable_current_modes():
        yield


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Where ops on the meta device are no part of the trace."""
    return torch._C._DisableTorchDispatch()


def batch_norm_reserve_elements(x: torch.Tensor) -> int:
    """How many bytes cuDNN's batch norm takes for its notes for backward."""
    with _disable_current_modes():
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch._C._get_cudnn_batch_norm_reserve_space_size(like, True)  # type: ignore[attr-defined, no-any-return]


def exchanged(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    size: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    elements: int | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """The same node's result with another dtype, size, strides or device, or memory for more elements."""
    mode = get_proxy_mode()
    with disable_proxy_modes_tracing():
        size, stride = size or tensor.shape, stride or tensor.stride()
        fixed = tensor.new_empty_strided(size, stride, dtype=dtype, device=device)
        if elements is not None:
            storage = fixed.new_empty(elements).untyped_storage()
            fixed = fixed.new_empty(0).set_(storage, 0, size, stride)
        if mode is None:
            return fixed
        slot = get_proxy_slot(tensor, mode.tracer)
        _see_as(slot.proxy.node, fixed.detach())
    set_proxy_slot(fixed, mode.tracer, slot)
    return fixed


def leave_out(tensor: torch.Tensor) -> None:
    """Let one of several results of a node be None."""
    _see_as(tracer_node(tensor), None)


def _see_as(node: torch.fx.Node | None, result: torch.Tensor | None) -> None:
    """Let a node of a trace stand for another result."""
    if node is None:
        return
    node.meta["val"] = result
    if node.target is operator.getitem:
        several, index = node.args
        assert isinstance(several, torch.fx.Node)
        assert isinstance(index, int)
        results = list(several.meta["val"])
        results[index] = result
        several.meta["val"] = tuple(results)


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Let autograd save what it saves as it is, also within a checkpoint, which counts it, or `save_on_cpu`."""
    hooks: list[Any] = []
    top: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    while pair := top(False):
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def has_symbolic_shape(outputs: Any) -> bool:
    """Whether the size of a fake result is not known until it is computed."""
    tensors = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return any(isinstance(n, torch.SymInt) for t in tensors if isinstance(t, torch.Tensor) for n in t.shape)


@contextlib.contextmanager
def seeding_refused(refuse: Callable[..., None]) -> Iterator[None]:
    """Call `refuse` where what is being traced seeds the default generators or sets their state."""
    homes = [
        (module, name)
        for module in (torch, torch.random, torch.cuda, torch.cuda.random)
        for name in ("manual_seed", "seed", "set_rng_state", "manual_seed_all", "seed_all", "set_rng_state_all")
        if hasattr(module, name)
    ]
    originals = [getattr(module, name) for module, name in homes]
    trace = get_proxy_mode()

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # on CUDA the backward pass is traced on autograd's own thread
            return (refuse if get_proxy_mode() is trace else original)(*args, **kwargs)

        return call

    for (module, name), original in zip(homes, originals, strict=True):
        setattr(module, name, guarded(original))
    try:
        yield
    finally:
        for (module, name), original in zip(homes, originals, strict=True):
            setattr(module, name, original)


@contextlib.contextmanager
def hooks_on_traced(
    register: Callable[[Callable[..., Any], torch.Tensor, Any], Any], retain: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Call these where `register_hook` (what it does comes first) and `retain_grad` are called on what is traced."""
    original = torch.Tensor.register_hook

    def registered(self: torch.Tensor, hook: Any) -> Any:
        return register(original, self, hook)

    FakeTensor.register_hook, FakeTensor.retain_grad = registered, retain  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del FakeTensor.register_hook, FakeTensor.retain_grad


@contextlib.contextmanager
def stepped_as_real(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have optimizers step fake parameters as they would step these: on a GPU all at once, which takes copies of them.

    They do so by themselves with tensors of the types that they know.
    """
    known = _STEPPED_AT_ONCE
    added = FakeTensor not in known and all(type(p) in known for p in parameters)
    if added:
        known.append(FakeTensor)
    try:
        yield
    finally:
        if added:
            known.remove(FakeTensor)


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
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is a leaf that autograd.grad was asked for
        return True


def backward_in_progress() -> int:
    """A number of its own for each backward pass, -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def also_arrives_otherwise(parameter: torch.Tensor) -> bool:
    """Whether the backward pass in progress goes through a parameter itself."""
    return parameter.requires_grad and engine_reaches(get_gradient_edge(parameter).node)


def backward_keeps_graph() -> bool:
    """Whether the backward pass in progress was asked to keep the graph (`retain_graph`, `create_graph`)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


_PRECISIONS = tuple((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))


def float32_precisions() -> dict[str, str]:
    """How precisely kernels multiply in float32, by what has a setting of its own.

    `torch.get_float32_matmul_precision` raises where somebody has used the settings that PyTorch recommends instead
    (`torch.backends.cuda.matmul.fp32_precision`).
    """
    get = torch._C._get_fp32_precision_getter
    found = {f"float32 precision of {backend} {op}": get(backend, op) for backend, op in _PRECISIONS}
    return {what: "ieee" if value == "none" else str(value) for what, value in found.items()}


def attention_order() -> tuple[int, ...]:
    """Which kernels of attention are preferred, the first that serves a call most of all."""
    return tuple(torch._C._get_sdp_priority_order())


# What libraries beside PyTorch's allocator say of it.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the machine, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    )


def wait_for_scaler_copies() -> None:
    """Have every `GradScaler` wait for copies of its scale that it makes from a GPU to the host."""
    original = _MultiDeviceReplicator.get

    def get(replicator: Any, device: torch.device) -> torch.Tensor:
        copied = device not in replicator._per_device_tensors and device.type == "cpu"
        found = original(replicator, device)
        if copied and replicator.master.is_cuda:
            torch.cuda.current_stream(replicator.master.device).synchronize()
        return found

    _MultiDeviceReplicator.get = get  # type: ignore[assignment,method-assign]


def timeout_of(group: torch.distributed.ProcessGroup) -> timedelta | None:
    """How long collectives of a process group wait for a rank; None where its backend does not say."""
    return max((backend.options._timeout for backend in _backends_of(group)), default=None)


def _backends_of(group: torch.distributed.ProcessGroup) -> list[Any]:
    """Those of a process group that say how long they wait for a rank."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [b for b in backends if getattr(b, "options", None) is not None]


@contextlib.contextmanager
def waits_end_within(seconds: float, but: torch.distributed.ProcessGroup) -> Iterator[None]:
    """What waits for other ranks meanwhile fails where it takes longer: collectives of all groups of this process but
    one, and the rendezvous store. What has a timeout of its own, or none, fails at once in this thread: messages to one
    rank, monitored barriers, new groups."""
    most = timedelta(seconds=seconds)
    c10d = torch.distributed.distributed_c10d
    backends = [backend for group in c10d._world.pg_map if group is not but for backend in _backends_of(group)]
    before: list[tuple[Callable[[timedelta], None], timedelta]] = []
    for backend in backends:
        before.append((backend._set_default_timeout, backend.options._timeout))
    store: Any = c10d._get_default_store()
    before.append((store.set_timeout, store.timeout))
    kind: Any = torch.distributed.ProcessGroup
    places: list[tuple[Any, str]] = [(c10d, "_new_group_with_tag")]
    places += [(kind, name) for name in ("send", "recv", "recv_anysource", "monitored_barrier", "split_group")]
    try:
        with contextlib.ExitStack() as patches:
            for place, name in places:
                patches.enter_context(_refused_here(place, name))
            for set_timeout, timeout in before:
                with contextlib.suppress(RuntimeError):  # of a kind that has none to set
                    set_timeout(min(timeout, most))
            yield
    finally:
        for set_timeout, timeout in before:
            with contextlib.suppress(RuntimeError):
                set_timeout(timeout)


@contextlib.contextmanager
def _refused_here(place: Any, name: str) -> Iterator[None]:
    """A function of a module or a class raises RuntimeError when this thread calls it."""
    thread, original = threading.get_ident(), vars(place)[name]  # as it stands there: it binds itself to groups
    call = getattr(place, name)

    @functools.wraps(call)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise RuntimeError(f"{name} may wait without a timeout of ours")
        return call(*args, **kwargs)

    setattr(place, name, refused)
    try:
        yield
    finally:
        setattr(place, name, original)


def is_timeout(error: RuntimeError) -> bool:
    """Whether a collective was given up because another rank did not come."""
    return re.search("timed out|timeout", str(error), re.IGNORECASE) is not None


def blas_workspace_bytes() -> int:
    """Bytes of the workspace that PyTorch gives cuBLAS on the current CUDA device, for each thread and stream."""
    known = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if known is not None:
        return int(known())
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(1024 * int(size) * int(count) for size, count in pairs)
    major, _ = torch.cuda.get_device_capability()
    return 32 << 20 if major >= 9 else (2 * 4096 + 8 * 16) << 10


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other ranks have parts of a tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def part_here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is sharded; any other as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def known_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage: as long as there is one, its `cdata` is the `_cdata` of no other storage.

    Memory that is freed and taken again (`fully_shard`, between forward and backward) leaves the storage the same one.
    """
    return StorageWeakRef(tensor.untyped_storage())


def collects_outputs() -> bool:
    """Whether a transformers model that is running has hooks collect outputs of its submodules."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return bool(collector is not None and collector.get())
