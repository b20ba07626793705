"""What an island gives: facts of its runs, and how these go with the sizes of what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memplan.capture.ops.places import Layout, Place, Source
from memplan.torch_private import pytree


@dataclass(frozen=True, slots=True)
class ForwardFacts:
    """What one run of a call gave.

    - outputs: where each output lies; of what is no tensor, the thing itself.
    - spec: how outputs are nested.
    - differentiable: by output.
    - saved: where each tensor lies that its graph saves.
    - results: layouts of what the forward op makes. The first `made` of them hold outputs.
    - uses: by input, how many gradients it gets.
    """

    outputs: tuple[Any, ...]
    spec: pytree.TreeSpec
    differentiable: tuple[bool, ...]
    saved: tuple[Place, ...]
    results: tuple[Layout, ...]
    made: int
    uses: tuple[int, ...]

    @property
    def returned(self) -> tuple[Any, ...]:
        """All but what is saved, and how often inputs are read."""
        return self.outputs, self.spec, self.differentiable, self.results[: self.made]

    @property
    def kept(self) -> tuple[Source, ...]:
        """Inputs and results that backward reads, each once."""
        return tuple(dict.fromkeys(place.source for place in self.saved))


@dataclass(frozen=True, slots=True)
class BackwardFacts:
    """What one run of the backward of a call gave.

    - given: which outputs it was given gradients of.
    - gradients: where the gradient of each use of each input that needs one lies; None: there is none.
    - results: layouts of what the backward op makes.
    """

    given: tuple[bool, ...]
    gradients: tuple[tuple[Place | None, ...], ...]
    results: tuple[Layout, ...]
