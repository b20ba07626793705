"""Traces of `make_fx`: make one, read and write the one in progress, refuse what must not happen in it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._subclasses.schema_check_mode  # else the first import that is heard may be this, by its own context
from torch import fx, nn
from torch._compile import _disable_dynamo
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd import forward_ad
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot, track_tensor
from torch.fx.graph import _BoxedCodeGen
from torch.nn.utils.stateless import _functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from memplan.torch_private.exchanged import exchanged
from memplan.torch_private.symbols import Symbols, is_symbolic, sizes_left_open
from memplan.torch_private.tensors import FakeTensor, _grouped_products_of_any_dtype

aten = torch.ops.aten

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
    """Trace a little in a thread that never ends.

    PyTorch 2.10 and 2.11 crash once the thread of their first trace has ended.
    """
    if torch.__version__ >= "2.12" or threading.current_thread() is threading.main_thread():
        return

    def trace() -> None:
        make_fx(torch.sin, tracing_mode="fake")(torch.ones(1))
        traced.set()
        threading.Event().wait()

    traced = threading.Event()
    threading.Thread(target=trace, daemon=True, name="memplan: first trace").start()
    traced.wait()


def trace_with_fakes(step: Callable[..., Any], args: tuple[Any, ...], symbols: Symbols, varies: bool) -> fx.GraphModule:
    """`make_fx` over fakes: the aten ops that eager would run, in order. It takes no memory.

    - symbols: those with which `args` were made.
    - varies: there are some, or there may be some in the trace.
    """
    _first_trace()
    with (
        _grouped_products_of_any_dtype(),
        _use_lazy_graph_module(True),  # makes no Python code for the graph, which is read and never run
        exchanged(fake_tensor.log, disabled=True),  # a fake kernel that fails raises, and whoever traces has words
        sizes_left_open() if varies else contextlib.nullcontext(),
        symbols.mode,
    ):
        # In other modes than "real" make_fx makes fakes of fakes, with symbols of its own.
        return make_fx(step, tracing_mode="real", _allow_non_fake_inputs=True, **_LEAN)(*args)


def not_tracing_for_transformers() -> contextlib.AbstractContextManager[None]:
    """A context in which transformers runs as it does outside of a trace.

    It asks `is_tracing(tensor)`, which is true for fake tensors. It then builds other masks and repeats key/value
    heads: other kernels and other bits than the plain step.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    original: Any = getattr(module, "is_fake_tensor", None)
    owner = threading.get_ident()
    of_others = {"is_fake_tensor": lambda tensor: threading.get_ident() != owner and original(tensor)}
    return exchanged(module, **({} if original is None else of_others))


def someone_traces() -> bool:
    """Whether forward runs for torch.func, `functional_call` too, forward-mode differentiation or a tracer."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _functional_call.__code__:
        frame = frame.f_back
    return (
        frame is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
    )


uncompiled = _disable_dynamo  # a decorator: torch.compile leaves such a function as it is, and goes on around it


def beneath_compiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` has wrapped; any other model itself."""
    wrapped = "OptimizedModule" in {kind.__name__ for kind in type(model).__mro__}  # to import it takes a second
    return model.get_submodule("_orig_mod") if wrapped else model


def is_compiled(model: object) -> bool:
    """Whether it is `torch.compile(module)`, or its forward or all of it was compiled in place."""
    return isinstance(model, nn.Module) and (beneath_compiled(model) is not model or runs_compiled(model))


def runs_compiled(module: nn.Module) -> bool:
    """Whether a call of a module runs compiled code before any code of its class."""
    own_forward = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
    return own_forward is not None or vars(module).get("_compiled_call_impl") is not None


@contextlib.contextmanager
def compiled_aside(model: nn.Module) -> Iterator[nn.Module]:
    """A context with the module beneath a compiled model, in which all its modules run as they are.

    A model that is not compiled stays itself. What forward calls beside modules stays compiled.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    tables = [(module, vars(module), dict(vars(module))) for module in modules if is_compiled(module)]
    for module, table, _ in tables:
        table.pop("_compiled_call_impl", None)
        inner = beneath_compiled(module)
        if inner is not module:
            table["forward"] = inner.__call__
        elif (compiled := table.get("forward")) is not None and runs_compiled(module):
            table["forward"] = compiled._torchdynamo_orig_callable
    try:
        yield beneath_compiled(model)
    finally:
        for _, table, before in tables:
            for name in ("_compiled_call_impl", "forward"):
                table.pop(name, None)
                table.update({name: before[name]} if name in before else {})


def is_call_of_compiled_code(error: BaseException) -> bool:
    """Whether a trace has ended because it came to a function that went through torch.compile."""
    return isinstance(error, RuntimeError) and "dynamo-optimized function" in str(error)


def tracer_graph() -> fx.Graph:
    """The graph of the trace in progress."""
    return _tracer().graph  # type: ignore[no-any-return]


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode is not None, "no trace in progress"
    return mode.tracer


def tracer_node(tensor: torch.Tensor) -> fx.Node | None:
    """The node that made `tensor` in the trace in progress; None for a tensor from outside."""
    slot = get_proxy_slot(tensor, _tracer(), None)
    return None if slot is None else slot.proxy.node


class Recording:
    """The trace in progress, to write to it what `make_fx` would write."""

    def __init__(self) -> None:
        self._tracer = _tracer()
        self._fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self._fake_mode.cache_enabled = False  # whoever remembers ops himself asks for each of them once

    @property
    def length(self) -> int:
        """The number of nodes so far."""
        return len(self._tracer.graph.nodes)

    def written_since(self, length: int) -> int:
        """The number of nodes that came after the first ones, without those that compute sizes."""
        latest = itertools.islice(reversed(self._tracer.graph.nodes), self.length - length)
        return sum(not is_symbolic(node.meta.get("val")) for node in latest)

    def node(self, tensor: Any) -> fx.Node | None:
        """The node that made a fake tensor. None for any other tensor, and for one whose data is known."""
        if type(tensor) is not FakeTensor or tensor.constant is not None:
            return None
        slot = get_proxy_slot(tensor, self._tracer, None)
        return None if slot is None or slot.constant is not None else slot.proxy.node

    def number(self, size: torch.SymInt) -> fx.Node:
        """The node that computes a size which varies."""
        slot: Any = get_proxy_slot(size, self._tracer)
        return slot.force().node  # type: ignore[no-any-return]

    def bind_number(self, size: torch.SymInt, node: fx.Node) -> None:
        """Let a new node that reads the number in a tensor stand for a symbol. node: the tensor's."""
        read = self.write(READ_SCALAR, (node,), {})
        read.meta["val"] = size
        set_proxy_slot(size, self._tracer, proxy_tensor.thunkify(self._tracer, lambda: fx.Proxy(read, self._tracer)))

    def unwritten(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which arithmetic with sizes that vary is not written to the trace."""
        return proxy_tensor.disable_proxy_modes_tracing()

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """A new node, under the name that `make_fx` would give it."""
        graph: fx.Graph = self._tracer.graph
        named = func.overloadpacket.__name__ if isinstance(func, torch._ops.OpOverload) else func.__name__
        return graph.create_node("call_function", func, args, kwargs, name=graph._target_to_str(named))

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Let `node` stand for the tensor from now on."""
        set_proxy_slot(tensor, self._tracer, proxy_tensor._ProxyTensor(fx.Proxy(node, self._tracer), None))

    def fake(self, contents: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor in the memory of one on the meta device, and with its layout."""
        return FakeTensor(self._fake_mode, contents, device)


def boxed(graph: fx.Graph) -> fx.Graph:
    """Let the graph's code take one list and empty it, so that the caller keeps nothing alive. Gives the graph."""
    graph.set_codegen(_BoxedCodeGen())
    return graph


def tracer_constants() -> Any:
    """The object whose attributes are the constants of the trace in progress."""
    return _tracer().root


# A context in which real ops run in the middle of a trace: no proxy, fake or other dispatch mode sees them.
outside_of_tracing = _disable_current_modes


def with_layout(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    size: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    elements: int | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """A node's result with another dtype, size, strides or device, or in memory for more elements."""
    mode = get_proxy_mode()
    with proxy_tensor.disable_proxy_modes_tracing():
        size, stride = size or tensor.shape, stride or tensor.stride()
        fixed = tensor.new_empty_strided(size, stride, dtype=dtype, device=device)
        if elements is not None:
            fixed = fixed.new_empty(0).set_(fixed.new_empty(elements).untyped_storage(), 0, size, stride)
        if mode is None:
            return fixed
        slot = get_proxy_slot(tensor, mode.tracer)
        _see_as(slot.proxy.node, fixed.detach())
    track_tensor(fixed, slot.proxy, constant=slot.constant, tracer=mode.tracer)  # its sizes too, if they are symbols
    return fixed


def leave_out(tensor: torch.Tensor) -> None:
    """Make one of several results of a node None."""
    _see_as(tracer_node(tensor), None)


def _see_as(node: fx.Node | None, result: torch.Tensor | None) -> None:
    """Let a node of a trace stand for another result."""
    if node is None:
        return
    node.meta["val"] = result
    if node.target is operator.getitem:
        several, index = node.args
        assert isinstance(several, fx.Node) and isinstance(index, int)
        results = list(several.meta["val"])
        results[index] = result
        several.meta["val"] = tuple(results)


@contextlib.contextmanager
def seeding_refused(refuse: Callable[..., None]) -> Iterator[None]:
    """A context that calls `refuse` where traced code seeds the default generators or sets their state."""
    names = ("manual_seed", "seed", "set_rng_state", "manual_seed_all", "seed_all", "set_rng_state_all")
    trace = get_proxy_mode()

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # on CUDA the backward pass is traced on autograd's own thread
            return (refuse if get_proxy_mode() is trace else original)(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for module in (torch, torch.random, torch.cuda, torch.cuda.random):
            guards = {name: guarded(getattr(module, name)) for name in names if hasattr(module, name)}
            stack.enter_context(exchanged(module, **guards))
        yield


@contextlib.contextmanager
def numbers_read_by_ops() -> Iterator[None]:
    """A context in which ops read numbers: for `torch.tensor` of a list of fake tensors, and for `tolist` of others."""
    original, trace, listed = torch.tensor, get_proxy_mode(), torch.Tensor.tolist

    @functools.wraps(original)
    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        leaves, spec = pytree.tree_flatten(data) if isinstance(data, (list, tuple)) else ([], None)
        if get_proxy_mode() is not trace or not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return original(data, *args, **kwargs)
        if kwargs.get("dtype") is None:
            dtypes = [leaf.dtype if isinstance(leaf, torch.Tensor) else original(leaf).dtype for leaf in leaves]
            kwargs["dtype"] = functools.reduce(torch.promote_types, dtypes)
        read = [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return original(pytree.tree_unflatten(read, spec), *args, **kwargs)  # type: ignore[arg-type]

    def tolist(tensor: torch.Tensor) -> Any:
        if get_proxy_mode() is not trace or isinstance(tensor, FakeTensor):
            return listed(tensor)
        return [tolist(part) for part in tensor] if tensor.dim() else tensor.item()

    with exchanged(torch, tensor=tensor), exchanged(torch.Tensor, tolist=tolist):
        yield


def higher_order_ops_refused(refuse: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """A context that calls `refuse` with the name of a higher-order op that traced code calls (`torch.cond`).

    PyTorch hands such ops to `torch.compile` before any mode sees them. Under the modes of a trace Dynamo would skip
    their code, and go on to skip it for good.
    """
    original, trace = torch.compile, get_proxy_mode()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller: FrameType | None = sys._getframe(1)
        if get_proxy_mode() is trace and caller is not None and _RUNS_HIGHER_ORDER_OPS(caller.f_code.co_filename):
            name = ""
            while caller is not None and caller.f_code.co_filename.startswith(_TORCH):
                name, caller = caller.f_code.co_name, caller.f_back
            refuse(name)
        return original(*args, **kwargs)

    return exchanged(torch, compile=call)


_TORCH = str(Path(torch.__file__).parent)
_RUNS_HIGHER_ORDER_OPS = re.compile("_higher_order_ops|flex_attention").search
