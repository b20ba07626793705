"""Modules that the model has not registered: in a list, behind an object, in a closure, among globals.

    self.teacher = [teacher]  # so that its parameters are not the model's

Their modes, attributes and members count like the model's own, and what they count themselves goes on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan

FACTOR = [1.0]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls, self.scale = nn.Linear(16, 16), nn.BatchNorm1d(16), 0, 1.0
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.linear(x)).tanh() * self.scale * FACTOR[0]  # type: ignore[no-any-return]


class Holder:
    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher


class Student(nn.Module):
    def __init__(self, find: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        self.inner, self.find = nn.Linear(16, 16), find

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = torch.zeros_like(x)
        if self.find is not None:
            with torch.no_grad():
                target = self.find()(x)
        return (self.inner(x).tanh() - target).square().mean()


TEACHERS: list[nn.Module] = []


def in_a_list(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    student.hidden = [teacher]
    return lambda: student.hidden[0]


def behind_an_object(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    student.holder = {"of": Holder(teacher)}
    return lambda: student.holder["of"].teacher


def past_setattr(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    object.__setattr__(student, "teacher", teacher)
    return lambda: student.teacher


def in_a_closure(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    return lambda: teacher


def among_globals(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    TEACHERS[:] = [teacher]
    return lambda: TEACHERS[0]


def in_a_class(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    Student.shared = teacher  # type: ignore[assignment]
    return lambda: student.shared


def by_a_weak_reference(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    student.known, student.kept = weakref.ref(teacher), [teacher]
    return lambda: student.known()


def by_a_method(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    student.target = teacher.forward
    return lambda: student.target


def by_a_partial(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    return functools.partial(lambda module: module, teacher)


def by_a_default(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    return lambda module=teacher: module


class Finds:
    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def __call__(self) -> nn.Module:
        return self.teacher


def by_a_called_object(student: Any, teacher: nn.Module) -> Callable[[], nn.Module]:
    return Finds(teacher)


PLACES = [
    in_a_list, behind_an_object, past_setattr, in_a_closure, among_globals, in_a_class, by_a_weak_reference,
    by_a_method, by_a_partial, by_a_default, by_a_called_object,
]  # fmt: skip


def change(teacher: Any, step: int) -> None:
    """What users do to a teacher between steps."""
    FACTOR[0] = 1.0 if step < 2 else 0.75
    if step == 3:
        teacher[1].scale = 0.5
    if step == 4:
        teacher.eval()
    if step == 5:
        teacher.train()
        teacher[0].norm.momentum = 0.5
    if step == 6:
        with torch.no_grad():
            teacher[0].linear.weight.mul_(2)
    if step == 7:
        teacher[0].linear = nn.Linear(16, 16).requires_grad_(False)


def trained(place: Callable[[Any, nn.Module], Callable[[], nn.Module]] | None, planned: bool) -> list[Any]:
    """place: where the teacher is; None: in the closure of a loss function."""
    torch.manual_seed(0)
    teacher, student, x = nn.Sequential(Layer(), Layer()), Student(None), torch.randn(32, 16)
    if place is not None:
        student.find = place(student, teacher)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return model(x) + (x - target).square().mean()  # type: ignore[no-any-return]

    loss_fn = loss_of if place is None else None
    if planned:
        memplan.apply(student, x, "1GiB", costs="estimate", loss_fn=loss_fn)
    seen = []
    for step in range(8):
        change(teacher, step)
        torch.manual_seed(step)
        x = torch.randn(32, 16)
        loss = student(x) if planned or loss_fn is None else loss_fn(student, x)
        loss.backward()
        state = [(layer.calls, {k: v.tolist() for k, v in layer.state_dict().items()}) for layer in teacher]  # type: ignore[operator]
        seen.append((loss.item(), state, student.inner.weight.grad.tolist()))  # type: ignore[union-attr]
        student.zero_grad()
    return seen


@pytest.mark.parametrize("place", [*PLACES, None])
def test_what_happens_to_a_hidden_module_is_heeded(
    place: Callable[[Any, nn.Module], Callable[[], nn.Module]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Student, "shared", None, raising=False)
    for plain, planned in zip(trained(place, False), trained(place, True), strict=True):
        assert planned == plain
