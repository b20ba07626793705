"""A captured step at other sizes: the same ops on the same values, with other numbers.

A step is analysed with symbols for what varies, so each question of the analysis about sizes becomes a condition. It is
then written down twice: as a step with the numbers of the call that it was captured with, which is what everything
after capture works on, and as `Sizes`, which know the expression behind each number.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memplan import torch_private as private
from memplan.capture.analysis.draft import tensor_in
from memplan.capture.analysis.traced import Kernel, Made, MetaTensor, Traced
from memplan.capture.ops.real_results import signature
from memplan.capture.ops.sizes import (
    CallSizes,
    Evaluation,
    Numbers,
    Sizes,
    TensorSizes,
    expression_of,
    expressions_in,
    put,
)
from memplan.capture.trace.raw_trace import RawTrace
from memplan.errors import UnsupportedModel
from memplan.torch_private import pytree


def with_sizes(traced: Traced, raw: RawTrace) -> Traced:
    """A step that was analysed with symbols, with the numbers of its call, and with `Sizes`.

    Raises UnsupportedModel where it is a step for this call's sizes alone, FixedSize where none of them can vary.
    """
    symbolic = raw.symbolic
    assert symbolic is not None
    places = tuple(dict.fromkeys(place for _, place in raw.fixed))
    if not symbolic.sources:
        raise private.FixedSize("sizes of 0 and 1 have plans of their own")
    if len(raw.fixed) == len(symbolic.sources):
        raise UnsupportedModel(f"PyTorch turns sizes into numbers: {'; '.join(places)}")
    symbols = symbolic.symbols
    if any(symbolic.sources[i].index is None for i in symbols.fixed):
        raise UnsupportedModel(f"PyTorch depends on a number that forward reads from data: {'; '.join(places)}")

    def written(thing: Any) -> Any:
        if isinstance(thing, MetaTensor):
            return MetaTensor(tuple(map(written, thing.size)), tuple(map(written, thing.stride)), thing.dtype)
        return expression_of(thing, symbols) if private.is_symbolic(thing) else thing

    nodes, results = dict[str, CallSizes](), dict[str, tuple[TensorSizes | None, ...]]()
    for node in traced.fx_graph.nodes:
        if expressions_in((node.args, node.kwargs)):
            nodes[node.name] = node.args, node.kwargs
        found = _results(node)
        if any(t is not None and private.varies(t) for t in found):
            results[node.name] = tuple(None if t is None else TensorSizes.of(t, symbols) for t in found)
    kernels = {}
    for index, kernel in enumerate(traced.kernels):
        call = pytree.tree_map(written, (kernel.args, kernel.kwargs))
        if expressions_in(call):
            kernels[index] = call
            if kernel.repeat_args != kernel.args:
                raise UnsupportedModel(f"{kernel.target} writes statistics, and has arguments that are sizes")
    sizes = Sizes(
        sources=tuple(symbolic.sources),
        here=tuple(symbols.values),
        fixed=places,
        conditions=symbols.conditions(),
        inputs=tuple(TensorSizes.of(t, symbols) for t in symbolic.tensors),
        values=tuple(expression_of(v.size_bytes, symbols) for v in traced.graph.values),
        nodes=nodes,
        results=results,
        kernels=kernels,
    )
    try:
        holds = sizes.broken(sizes.here) is None
    except Exception as error:  # of what PyTorch writes and Python can't read
        raise private.FixedSize(f"a condition on sizes can't be evaluated: {error}") from None
    if not holds:
        raise private.FixedSize("a condition on sizes does not hold for the sizes that it comes from")
    return at_sizes(dataclasses.replace(traced, sizes=sizes), sizes.here)


def at_sizes(traced: Traced, numbers: Numbers) -> Traced:
    """The step of a call whose sizes are these numbers, which must keep the step's conditions."""
    sizes = traced.sizes
    assert sizes is not None
    varying = [*sizes.nodes.values(), *sizes.results.values(), *sizes.kernels.values()]
    value = Evaluation(expressions_in(varying)).at(numbers)
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    memories: dict[int, torch.UntypedStorage] = {}
    for node in traced.fx_graph.nodes:
        copied = graph.node_copy(node, new.__getitem__)
        new[node] = by_name[node.name] = copied
        if node.name in sizes.nodes:
            call = put(sizes.nodes[node.name], value)
            copied.args, copied.kwargs = fx.map_arg(call, lambda n: by_name[n.name])
        copied.meta = dict(node.meta)
        if node.name in sizes.results:
            found = [
                t if size is None or t is None else private.fake_like(t, *_layout(size, value, memories))
                for t, size in zip(_results(node), sizes.results[node.name], strict=True)
            ]
            several = node.meta["val"]
            copied.meta["val"] = type(several)(found) if isinstance(several, (list, tuple)) else found[0]
    copies = {id(old): copied for old, copied in new.items()}
    kernels = list[Kernel]()
    for index, old in enumerate(traced.kernels):
        args, kwargs, repeat_args = fx.map_arg((old.args, old.kwargs, old.repeat_args), new.__getitem__)
        if (call := sizes.kernels.get(index)) is not None:
            args, kwargs = fx.map_arg(put(call, value), lambda n: by_name[n.name])
            repeat_args = args
        reads = {new[n]: v for n, v in old.reads.items()}
        made = tuple(Made(new[m.node], m.index, m.value) for m in old.made)
        kernels.append(Kernel(new[old.node], old.target, args, kwargs, reads, made, repeat_args))
    value_bytes = sizes.bytes_of(sizes.values, numbers)
    about_nodes = {name: copy.deepcopy(getattr(traced, name), copies) for name in _ABOUT_NODES}
    return dataclasses.replace(
        traced,
        graph=dataclasses.replace(
            traced.graph,
            values=tuple(
                dataclasses.replace(v, size_bytes=n, tensor=tensor_in(about_nodes["roots"][index]))
                for index, (v, n) in enumerate(zip(traced.graph.values, value_bytes, strict=True))
            ),
            ops=tuple(
                dataclasses.replace(op, key=signature(k.target, k.args, k.kwargs, k.node.meta.get("val")))
                for op, k in zip(traced.graph.ops, kernels, strict=True)
            ),
        ),
        kernels=tuple(kernels),
        **about_nodes,
        sizes=dataclasses.replace(sizes, here=numbers),
    )


_ABOUT_NODES = ("roots", "parents", "residents", "outputs", "gradients", "tangent_nodes", "guards")


def _results(node: fx.Node) -> list[torch.Tensor | None]:
    """The tensors that a node stands for; None for other results."""
    result = node.meta.get("val")
    several = result if isinstance(result, (list, tuple)) else [result]
    return [t if isinstance(t, torch.Tensor) else None for t in several]


def _layout(
    size: TensorSizes, value: Callable[[Any], Any], memories: dict[int, torch.UntypedStorage]
) -> tuple[torch.UntypedStorage, int, list[int], list[int]]:
    """(memory, offset, shape, stride) of a result at the numbers of a call."""
    if size.memory not in memories:
        memories[size.memory] = private.meta_memory(value(size.memory_bytes))
    return memories[size.memory], value(size.offset), list(map(value, size.shape)), list(map(value, size.stride))
