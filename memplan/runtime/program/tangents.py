"""The gradients from which a backward program starts: their layouts, at any sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from memplan.capture.analysis.traced import Traced
from memplan.capture.ops.sizes import Evaluation, Numbers, TensorSizes, expressions_in
from memplan.capture.trace.raw_trace import Autocast, GradientLayout


def layouts_of(tangents: Mapping[int, torch.Tensor]) -> dict[int, GradientLayout]:
    """The layouts of gradients that have arrived, by position of their output."""
    return {index: GradientLayout.of(tangent) for index, tangent in tangents.items()}


@dataclass(frozen=True, slots=True)
class PlannedTangent:
    """The layout of the gradient that backward was captured for, of one output, at any sizes.

    - layout: at the sizes of the capture.
    - sizes, values: what it is at others, and what computes that; None where it does not vary.
    """

    layout: GradientLayout
    sizes: TensorSizes | None = None
    values: Evaluation | None = None

    @staticmethod
    def all_of(traced: Traced) -> dict[int, PlannedTangent]:
        """By position of the output, for outputs that backward starts from."""
        found = {}
        for index, output in enumerate(traced.outputs):
            if output.tangent is not None:
                node = traced.tangent_nodes[output.tangent]
                (size,) = (None,) if traced.sizes is None else traced.sizes.results.get(node.name, (None,))
                values = None if size is None else Evaluation(expressions_in(size))
                found[index] = PlannedTangent(GradientLayout.of(node.meta["val"]), size, values)
        return found

    def at(self, numbers: Numbers) -> GradientLayout:
        if self.sizes is None or self.values is None:
            return self.layout
        value = self.values.at(numbers)
        shape, stride = tuple(map(value, self.sizes.shape)), tuple(map(value, self.sizes.stride))
        return dataclasses.replace(self.layout, shape=shape, stride=stride)


class Backwards:
    """The backward programs of a step, with the gradients that each was captured for.

    autocasts: under which backward has these ops; None: without autocast.
    """

    def __init__(
        self,
        programs: Sequence[tuple[dict[int, PlannedTangent], fx.GraphModule]],
        outputs: Sequence[str],
        autocast: Autocast | None,
    ) -> None:
        """Take at least one program. outputs: names of all outputs."""
        self._all, self._outputs, self.autocasts = tuple(programs), outputs, {autocast}
        self._first = self._all[0][0]
        self.programs = [program for _, program in self._all]

    def program_for(
        self, tangents: dict[int, torch.Tensor], autocast: Autocast | None, numbers: Numbers
    ) -> fx.GraphModule | str:
        """The program for gradients of this layout, under this autocast; in words why there is none, if there is none.

        numbers: of the forward's sizes.
        """
        if autocast not in self.autocasts:
            there = "outside of" if autocast is None else "under"
            return (
                f"backward runs {there} autocast, unlike what was planned; its ops round otherwise there. Call "
                "backward after the context of autocast has ended, as PyTorch recommends"
            )
        for index in tangents.keys() - self._first.keys():
            return (
                f"backward reached output {self._outputs[index]}, but the plan starts backward from "
                f"{', '.join(self._outputs[i] for i in self._first)} alone. Put the whole loss inside with loss_fn="
            )
        for index in self._first.keys() - tangents.keys():
            return (
                f"backward did not reach output {self._outputs[index]}, but the plan starts backward from it. "
                "Put the loss inside with loss_fn="
            )
        layouts = layouts_of(tangents)
        planned = [{i: layout.at(numbers) for i, layout in of_one.items()} for of_one, _ in self._all]
        for expected, (_, program) in zip(planned, self._all, strict=True):
            if layouts == expected:
                return program
        index = next(i for i in layouts if layouts[i] != planned[0][i])
        return (
            f"the gradient of output {self._outputs[index]} arrives with strides {layouts[index].stride} and dtype "
            f"{layouts[index].dtype}, but was planned with strides {planned[0][index].stride} and "
            f"{planned[0][index].dtype}; eager would run other kernels on it. Put the loss inside with loss_fn="
        )
