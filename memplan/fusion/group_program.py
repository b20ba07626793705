"""A group as plain data: equal for equal groups, readable by other processes, which compile and try it.

They do so in parallel, and a compiler that crashes or hangs takes nothing with it. A worker reads one pickled program
after the other, compiles and tries it, and answers each with a line of JSON: empty, or what went wrong. It is a fresh
interpreter, not a fork, so that it neither imports the user's script nor shares the state of threads and devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import operator
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

import memplan
from memplan import torch_private as private
from memplan.capture.ops.layout import storage_key
from memplan.fusion.groups import FusedGroup
from memplan.fusion.step_graph import filled, with_slots
from memplan.logs import show_count

aten, prims = torch.ops.aten, torch.ops.prims

# Beside what PyTorch tags as pointwise: elements stay where they are.
_IN_PLACE = frozenset({
    prims.convert_element_type.default, aten.clone.default, aten.view.default, aten._unsafe_view.default,
    aten.unsqueeze.default, aten.full.default, aten.scalar_tensor.default,
})  # fmt: skip


@dataclass(frozen=True)
class GroupProgram:
    """What a group computes. Called with its inputs it runs the primitives one by one.

    - steps: its primitives, each with its arguments. Slots count inputs first, then what steps made.
    - results: the slots that it returns.
    - inputs, outputs: how they lie in memory.
    - over: position of an output -> that of the input that it may be written over.
    - options: of `torch._inductor.config`.
    """

    steps: tuple[tuple[str, Any], ...]
    results: tuple[int, ...]
    inputs: tuple[private.MemoryLayout, ...]
    outputs: tuple[private.MemoryLayout, ...]
    over: Mapping[int, int]
    options: Mapping[str, Any]

    @staticmethod
    def of(group: FusedGroup) -> GroupProgram:
        slots = {node: position for position, node in enumerate(group.inputs)}
        steps: list[tuple[str, Any]] = []

        def slot(node: fx.Node) -> int:
            if node not in slots:  # its views come with it
                arguments = with_slots((node.args, node.kwargs), slot)
                slots[node] = len(slots)
                # Ops themselves can't be pickled.
                steps.append(("getitem" if node.target is operator.getitem else str(node.target), arguments))
            return slots[node]

        for node in group.nodes:
            slot(node)
        results = tuple(map(slot, group.outputs))
        return GroupProgram(
            tuple(steps),
            results,
            tuple(private.MemoryLayout.of(node.meta["val"]) for node in group.inputs),
            tuple(private.MemoryLayout.of(node.meta["val"]) for node in group.outputs),
            dict(group.over),
            {"size_asserts": False, **private.deterministic_options(group.outputs[0].meta["val"].device)},
        )

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        made = list(inputs)
        for name, arguments in self.steps:
            args, kwargs = filled(arguments, made)
            made.append(_function_of(name)(*args, **kwargs))
        return [made[slot] for slot in self.results]

    @property
    def device(self) -> torch.device:
        return torch.device(self.outputs[0].device)

    @property
    def key(self) -> str:
        """Equal for programs that are compiled to the same code."""
        card: tuple[Any, ...] = ()  # on which code depends beside the kind of a device
        if self.device.type == "cuda":
            card = torch.cuda.get_device_name(self.device), torch.cuda.get_device_capability(self.device)
        identity = (
            self.steps, self.results, self.inputs, self.outputs, sorted(self.over.items()),
            sorted(self.options.items()), card, torch.__version__, memplan.__version__,
        )  # fmt: skip
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:20]

    def writing(self, over: Mapping[int, int] | None) -> GroupProgram:
        """The program with what it really writes over what. Itself where that is not known, or is more than it may."""
        return self if over is None or not self._may(over) else dataclasses.replace(self, over=over)

    def _may(self, over: Mapping[int, int]) -> bool:
        return set(over.values()) <= set(self.over.values()) and all(output < len(self.outputs) for output in over)

    def compiled(self) -> tuple[private.CompiledCall, dict[int, int]]:
        """The program compiled and run once, and what it really writes over what.

        Where that is less than it may, it is compiled again, and keeps what it would have given away for nothing.
        Raises what Inductor and the compiler raise, and ValueError where results are not what they should be.
        """
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            if self.is_pointwise():
                call = private.compiled_graph(self._with_copies, self.inputs, (), self.options)
            else:
                call = private.compiled_graph(self, self.inputs, list(self.over.values()), self.options)
            over = self._tried(call)
        if not self._may(over):
            raise ValueError("it writes over what others read")
        if len(over) == len(self.over):  # it may have put results elsewhere among the memory that it was given
            return call, over
        return dataclasses.replace(self, over=over).compiled()

    def is_pointwise(self) -> bool:
        """Whether each element of a result depends on those in its place alone."""
        functions = [_function_of(name) for name, _ in self.steps]
        return all(torch.Tag.pointwise in getattr(f, "tags", ()) or f in _IN_PLACE for f in functions)

    def _with_copies(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The program with copies of results over inputs.

        Pointwise kernels then write there at once. Inductor itself does not where two of its nodes read the input.
        """
        made = self(*inputs)
        for output, given in self.over.items():
            written = inputs[given].copy_(made[output].view(inputs[given].shape))
            made[output] = written.view(made[output].shape)
        return made

    def _tried(self, call: private.CompiledCall) -> dict[int, int]:
        """Run it once, which loads its code, and see which outputs lie in the memory of which inputs."""
        given = [_made_up(layout) for layout in self.inputs]
        inputs = {storage_key(t): position for position, t in enumerate(given)}
        made = call([*given])
        if len({storage_key(t) for t in made}) != len(made):
            raise ValueError("two results share memory")
        for tensor, wanted in zip(made, self.outputs, strict=True):
            if private.MemoryLayout.of(tensor) != wanted:
                raise ValueError(f"a result lies as {private.MemoryLayout.of(tensor)} instead of {wanted}")
        return {o: inputs[storage_key(t)] for o, t in enumerate(made) if storage_key(t) in inputs}


def read_record(key: str) -> dict[int, int] | None:
    """What the compiled group of a key writes over what: position of an output -> that of an input. None: not known."""
    try:
        return {int(output): int(given) for output, given in json.loads(_record(key).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def write_record(key: str, over: Mapping[int, int]) -> None:
    """Keep it, as far as the disk lets one."""
    with contextlib.suppress(OSError):
        _record(key).parent.mkdir(parents=True, exist_ok=True)
        _record(key).write_text(json.dumps(dict(over)))


def _record(key: str) -> Path:
    """A file in Inductor's cache: records go when the code goes."""
    return Path(private.inductor_cache_dir()) / "memplan" / f"{key}.json"


def _function_of(name: str) -> Any:
    if name.startswith("prims.inductor"):
        private.seed_ops()  # they are there once they are loaded
    return operator.getitem if name == "getitem" else operator.attrgetter(name)(torch.ops)


def _made_up(layout: private.MemoryLayout) -> torch.Tensor:
    """A real tensor of a layout. Indices of 0 are valid everywhere."""
    value = 0.5 if layout.dtype.is_floating_point else 0
    flat = torch.full((layout.storage_bytes // layout.dtype.itemsize,), value, dtype=layout.dtype, device=layout.device)
    return flat.as_strided(layout.shape, layout.stride, layout.offset)


PATIENCE_S = 300.0  # for one group
_READY = "ready"
_ON_GPU_BYTES = 2 << 30  # a worker holds a context there, and tries groups
_OUT_OF_MEMORY = "OutOfMemoryError"


def compile_elsewhere(programs: Mapping[str, GroupProgram]) -> dict[str, str]:
    """Compile programs in other processes, which leave the code on disk. Gives those that failed, with the reason.

    Programs are not touched where no worker comes up, or a GPU has no room for what each worker holds there.
    """
    left, failed, done = list(programs.items()), dict[str, str](), 0
    on_gpu = {program.device for program in programs.values() if program.device.type == "cuda"}
    room = (torch.cuda.mem_get_info(device)[0] // _ON_GPU_BYTES for device in on_gpu)
    count = 0 if sys.platform == "win32" else min(len(left), os.cpu_count() or 1, *room)  # Windows can't wait for pipes
    workers = [_Worker(bool(on_gpu)) for _ in range(count)]
    try:
        while workers:
            wait_s = max(0.0, min(worker.until_s for worker in workers) - time.monotonic())
            ready, _, _ = select.select([worker.stdout for worker in workers], [], [], wait_s)
            for worker in [w for w in workers if w.stdout in ready or w.until_s <= time.monotonic()]:
                # What went wrong, empty where nothing did; None where no answer will come.
                line = worker.stdout.readline() if worker.stdout in ready else b""
                answer = str(json.loads(line)) if line else None
                if worker.job is not None:
                    done += 1
                    show_count("compiling groups", done, len(programs))
                    may_fit_here = on_gpu and answer and _OUT_OF_MEMORY in answer  # in this process
                    if answer != "" and not may_fit_here:
                        failed[worker.job] = answer or "the compiler crashed, or took too long"
                elif answer != _READY:
                    left = []  # no worker can run here
                if answer is None or not left:
                    worker.stop()
                    workers.remove(worker)
                    workers += [_Worker(bool(on_gpu))] if left else []
                else:
                    worker.give(*left.pop(0))
    finally:
        for worker in workers:
            worker.stop()
    return failed


class _Worker:
    """Another process. job: the key of what it compiles; None while it starts."""

    def __init__(self, on_gpu: bool) -> None:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, **({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})},
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        self.job: str | None = None
        self.until_s = time.monotonic() + PATIENCE_S

    def give(self, key: str, program: GroupProgram) -> None:
        self.job, self.until_s = key, time.monotonic() + PATIENCE_S
        with contextlib.suppress(OSError):  # it has died, which its output tells
            pickle.dump((key, program), self.stdin)
            self.stdin.flush()

    def stop(self) -> None:
        """End it, and the compilers that it runs."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def serve() -> None:
    """What a worker runs. Answers leave through a copy of standard output, which compilers may write to."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: str) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(_READY)
    with contextlib.suppress(EOFError):
        while True:
            key, program = pickle.load(sys.stdin.buffer)
            try:
                write_record(key, program.compiled()[1])
                say("")
            except Exception as error:
                say(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
