"""Random numbers while a step is traced: generators stay as they were, and dropout may become a function of seeds."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from memplan import torch_private as private
from memplan.capture.ops.ways import MakeIslands, Refusal
from memplan.capture.trace.source_lines import caller_line
from memplan.errors import UnsupportedModel

aten = torch.ops.aten
_SEEDS = 256  # drawn at once: no model so far takes more


@contextlib.contextmanager
def generator_kept(device: torch.device, around: Callable[[], tuple[Any, ...]] = tuple) -> Iterator[None]:
    """A context that leaves generators as they are.

    Raises a Refusal if Python's generators were drawn from. around: gives the calls in which.
    """
    devices = [device] if device.type == "cuda" else []
    with python_generators_kept():
        random.random(), np.random.random()  # now they are where no seed puts them
        before = python_generators()
        with torch.random.fork_rng(devices=devices):
            yield
        moved = python_generators() != before
    if moved:
        raise Refusal(
            "forward draws from Python's random or numpy.random; a planned step would take the same number each time. "
            "Draw it outside of forward and pass it in, or use torch's generator",
            MakeIslands([around()]),
        )


@contextlib.contextmanager
def python_generators_kept() -> Iterator[None]:
    """A context that leaves Python's and NumPy's own generators as they are."""
    put_back = python_generators_here()
    try:
        yield
    finally:
        put_back()


def python_generators_here() -> Callable[[], None]:
    """What puts Python's and NumPy's own generators to where they are now."""
    python_state, numpy_state = random.getstate(), np.random.get_state()

    def put() -> None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)

    return put


@contextlib.contextmanager
def noting_draws(note: Callable[[], None]) -> Iterator[None]:
    """A context that calls `note` after each function that draws from Python's or NumPy's own generator."""

    def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawing(*args: Any, **kwargs: Any) -> Any:
            drawn = draw(*args, **kwargs)
            note()
            return drawn

        return drawing

    with contextlib.ExitStack() as stack:
        for home in (random, np.random):
            own, generator = vars(home).items(), home.random.__self__
            draws = {name: noting(f) for name, f in own if getattr(f, "__self__", None) is generator}
            stack.enter_context(private.exchanged(home, **{n: f for n, f in draws.items() if n not in _LOOK}))
        yield


_LOOK = ("getstate", "get_state")


def seed_all(seed: int) -> None:
    """Seed PyTorch's generators, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def seeding_itself(*args: Any, **kwargs: Any) -> None:
    raise UnsupportedModel(
        f"forward seeds the generator or sets its state, at {caller_line()}; a planned step would not. Draw the "
        "numbers outside of forward and pass them in. Where it is torch.utils.checkpoint that does so, leave that out"
    )


def python_generators() -> tuple[Any, ...]:
    """The states of Python's and NumPy's own generators, to be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), rest


class CountedRandom:
    """Writes masks of dropout to a trace as functions of a seed, which fused groups compute.

    A number depends on a seed and on its place in the tensor alone, by a counter-based generator (Philox; Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so it is the same whenever, and in whichever group, it
    is made. Seeds are drawn from PyTorch's generator once a step. run: runs an op and writes it to the trace.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run, (self._draw_op, self._uniform_op) = run, private.seed_ops()
        self._seeds: dict[torch.device, tuple[torch.Tensor, int]] = {}  # and how many are used

    def instead(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The results of a random op, from a seed. None for an op that draws from the generator, or is not random."""
        if func is aten.native_dropout.default and False not in args[2:]:
            tensor, p = args[:2]
            kept = self._run(aten.ge.Scalar, self._uniform(tensor), p)
            scaled = self._run(aten.mul.Tensor, tensor, 0.0 if p == 1 else 1 / (1 - p))
            return self._run(aten.mul.Tensor, scaled, kept), kept
        if func is aten.bernoulli_.float:
            tensor, p = (*args, 0.5)[:2]
            return self._run(aten.copy_.default, tensor, self._run(aten.lt.Scalar, self._uniform(tensor), p))
        return None

    def _uniform(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers in [0, 1), float32, in the shape of a tensor."""
        device = tensor.device
        seeds, used = self._seeds.get(device, (None, _SEEDS))
        if used == _SEEDS:
            seeds, used = self._run(self._draw_op, _SEEDS, device), 0
        assert seeds is not None
        self._seeds[device] = seeds, used + 1
        seed = self._run(aten.select.int, seeds, 0, used)
        uniform: torch.Tensor = self._run(self._uniform_op, list(tensor.shape), seed, "rand")
        return uniform
