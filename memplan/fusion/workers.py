"""Processes that compile groups: in parallel, and so that a compiler that crashes or hangs takes nothing with it.

A worker reads one pickled program after the other, compiles and tries it, and answers each with a line of JSON: empty,
or what went wrong. It is a fresh interpreter, not a fork, so that it neither imports the user's script nor shares
the state of threads and devices.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

from memplan.fusion.group_program import GroupProgram
from memplan.fusion.records import write_record
from memplan.logs import show_count

PATIENCE_S = 300.0  # for one group
_READY = "ready"

_Jobs = queue.SimpleQueue[tuple[str, GroupProgram]]


def compile_elsewhere(programs: Mapping[str, GroupProgram]) -> dict[str, str]:
    """Compile programs in other processes, which leave the code on disk. Gives those that failed, with the reason.

    Programs are not touched where no worker comes up.
    """
    jobs: _Jobs = queue.SimpleQueue()
    for job in programs.items():
        jobs.put(job)
    failed: dict[str, str] = {}
    done = itertools.count(1)

    def one_more() -> None:
        show_count("compiling groups", next(done), len(programs))

    workers = min(len(programs), os.cpu_count() or 1)
    threads = [threading.Thread(target=_drive, args=(jobs, failed, one_more)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def _drive(jobs: _Jobs, failed: dict[str, str], one_more: Callable[[], None]) -> None:
    """Give one job after the other to a worker, and to a new one after a crash."""
    worker: _Worker | None = None
    try:
        while True:
            if worker is None:
                worker = _Worker()
                if worker.answer() != _READY:
                    return
            try:
                key, program = jobs.get_nowait()
            except queue.Empty:
                return
            answer = worker.ask(key, program)
            if answer is None:
                worker.stop()
                worker = None
                answer = "the compiler crashed, or took too long"
            if answer:
                failed[key] = answer
            one_more()
    finally:
        if worker is not None:
            worker.stop()


class _Worker:
    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def ask(self, key: str, program: GroupProgram) -> str | None:
        """What went wrong with a program; empty where nothing did, None where no answer comes."""
        assert self._process.stdin is not None
        try:
            pickle.dump((key, program), self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            return None
        return self.answer()

    def answer(self) -> str | None:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if ready else b""
        return str(json.loads(line)) if line else None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()


def serve() -> None:
    """What a worker runs. Answers leave through a copy of standard output, which compilers may write to."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: str) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(_READY)
    for key, program in _programs(sys.stdin.buffer):
        try:
            write_record(key, program.compiled()[1])
            say("")
        except Exception as error:
            say(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _programs(stream: BinaryIO) -> Iterator[tuple[str, GroupProgram]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(stream)
