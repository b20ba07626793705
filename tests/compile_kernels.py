"""Compiles the solvers that most tests use, once: processes that run tests side by side would else each do it."""

from __future__ import annotations

from dataclasses import replace

from memplan.problem.data import Link
from memplan.solvers import solve_front
from memplan.solvers.offload.fit_copies import least_bytes, solve_offload
from tests.support.random_graphs import llama_like


def main() -> None:
    problem = replace(llama_like(2), link=Link(25e9, 25e9))
    front = solve_front(problem)
    solve_offload(problem, front.points, front.floor.peak_bytes, 1 << 40)
    least_bytes(problem, front.floor.order)


if __name__ == "__main__":
    main()
