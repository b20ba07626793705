"""The gradients from which a backward program starts: their layouts, at any sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.layout import Layout
from memplan.capture.ops.sizes import Evaluation, Numbers, TensorSizes, expressions_in
from memplan.capture.trace.raw_trace import Autocast

Tangents = dict[int, torch.Tensor]  # gradients that have arrived, by position of their output


def layouts_of(tangents: Tangents) -> dict[int, Layout]:
    return {index: Layout.of(tangent) for index, tangent in tangents.items()}


def planned_tangents(traced: Traced) -> Callable[[Numbers], Mapping[int, Layout]]:
    """The layouts of the gradients that backward was captured for, by position of their output, at any sizes."""
    planned, varying = dict[int, Layout](), dict[int, TensorSizes]()
    for index, output in enumerate(traced.outputs):
        if output.tangent is not None:
            node = traced.tangent_nodes[output.tangent]
            planned[index] = Layout.of(node.meta["val"])
            (size,) = (None,) if traced.sizes is None else traced.sizes.results.get(node.name, (None,))
            if size is not None:
                varying[index] = size
    values = Evaluation(expressions_in(varying))

    def at(numbers: Numbers) -> Mapping[int, Layout]:
        if not varying:
            return planned
        value, found = values.at(numbers), dict(planned)
        for index, size in varying.items():
            shape, stride = tuple(map(value, size.shape)), tuple(map(value, size.stride))
            found[index] = planned[index]._replace(shape=shape, stride=stride)
        return found

    return at


class Backwards:
    """The backward programs of a step, with the gradients that each was captured for.

    autocasts: under which backward has these ops; None: without autocast.
    """

    def __init__(
        self,
        programs: Sequence[tuple[Callable[[Numbers], Mapping[int, Layout]], fx.GraphModule]],
        outputs: Sequence[str],
        autocast: Autocast | None,
    ) -> None:
        """programs: at least one, each with its `planned_tangents`. outputs: names of all outputs."""
        self._all, self._outputs, self.autocasts = programs, outputs, {autocast}
        self.programs = [program for _, program in programs]

    def program_for(self, tangents: Tangents, autocast: Autocast | None, numbers: Numbers) -> fx.GraphModule | str:
        """The program for gradients of this layout, under this autocast, at these sizes; or why there is none."""
        if autocast not in self.autocasts:
            there = "outside of" if autocast is None else "under"
            return (
                f"backward runs {there} autocast, unlike what was planned; its ops round otherwise there. Call "
                "backward after the context of autocast has ended, as PyTorch recommends"
            )
        planned = [at(numbers) for at, _ in self._all]
        first = planned[0]
        for index in tangents.keys() - first.keys():
            return (
                f"backward reached output {self._outputs[index]}, but the plan starts backward from "
                f"{', '.join(self._outputs[i] for i in first)} alone. Put the whole loss inside with loss_fn="
            )
        for index in first.keys() - tangents.keys():
            return (
                f"backward did not reach output {self._outputs[index]}, but the plan starts backward from it. "
                "Put the loss inside with loss_fn="
            )
        layouts = layouts_of(tangents)
        for expected, program in zip(planned, self.programs, strict=True):
            if layouts == expected:
                return program
        index = next(i for i in layouts if layouts[i] != first[i])
        return (
            f"the gradient of output {self._outputs[index]} arrives with strides {layouts[index].stride} and dtype "
            f"{layouts[index].dtype}, but was planned with strides {first[index].stride} and "
            f"{first[index].dtype}; eager would run other kernels on it. Put the loss inside with loss_fn="
        )
