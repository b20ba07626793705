"""Processes that compile groups: in parallel, and so that a compiler that crashes or hangs takes nothing with it.

A worker reads one pickled program after the other, compiles and tries it, and answers each with a line of JSON: empty,
or what went wrong. It is a fresh interpreter, not a fork, so that it neither imports the user's script nor shares
the state of threads and devices.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import torch

from memplan.fusion.group_program import GroupProgram, write_record
from memplan.logs import show_count

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
