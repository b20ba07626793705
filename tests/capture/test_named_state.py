"""What a model's code names outside of the model: it is checked before each call, and put back after a trace."""

from __future__ import annotations

import contextvars
import copy
import functools
import importlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.capture.attributes.code_facts import facts_of_code
from memplan.capture.attributes.named_state import NamedState
from tests.support.plannings import plannings

SCALE, FLAG, TABLE, UNUSED = 1.0, True, {"factor": [1.0]}, 3
LARGE = dict.fromkeys(range(1000), 1.0)


class Config:
    def __init__(self) -> None:
        self.scale, self.other = 1.0, 0


CONFIG = Config()


class Options:
    scale = 1.0
    unnamed = 1.0

    @classmethod
    def times(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.scale


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE if FLAG else x


def scaling() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    factor = 1.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    return scaled, change


SCALED, CHANGE = scaling()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Options.times(SCALED(helper(torch.tanh(self.layer(x)))))
        return (x * TABLE["factor"][0] * CONFIG.scale * LARGE[0]).pow(2).mean()


def through(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Code of which the model is the first argument."""
    return net.scaled(x) * net.scale  # type: ignore[no-any-return]


class Through(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return through(self, self.layer(x)).pow(2).mean()

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * TABLE["factor"][0]

    @property
    def scale(self) -> float:
        return SCALE


class Registry:
    known: list[type[Any]] = []  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        Registry.known.append(cls)


class Kind(Registry):
    def value(self) -> float:
        return SCALE


class ByRegistry(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * Registry.known[0]().value()).pow(2).mean()


class ByPartial(Net):
    def times(self, count: int) -> float:
        return count * SCALE

    twice = functools.partialmethod(times, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.twice()).pow(2).mean()


@pytest.fixture(autouse=True)
def as_at_first() -> Iterator[None]:
    global SCALE, FLAG
    yield
    SCALE, FLAG, TABLE["factor"][0], CONFIG.scale, CONFIG.other, Options.scale = 1.0, True, 1.0, 1.0, 0, 1.0
    CHANGE(1.0)


def set_global(value: float) -> None:
    global SCALE
    SCALE = value


def set_flag(value: float) -> None:
    global FLAG
    FLAG = value == 1.0


def set_in_container(value: float) -> None:
    TABLE["factor"][0] = value


def set_attribute(value: float) -> None:
    CONFIG.scale = value


def set_on_class(value: float) -> None:
    Options.scale = value


CHANGES = [set_global, set_flag, set_in_container, set_attribute, set_on_class, CHANGE]


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    net(x).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_the_code_names_is_checked_before_each_call(change: Callable[[float], None]) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 8)
    planned = memplan.apply(copy.deepcopy(net), x, "1GiB", costs="estimate")
    for value in (1.0, 2.0, 1.0):
        change(value)
        assert all(map(torch.equal, gradients(net, x), gradients(planned, x)))


@pytest.mark.parametrize(
    ("kind", "change"),
    [(Through, set_global), (Through, set_in_container), (ByRegistry, set_global), (ByPartial, set_global)],
)
def test_what_code_names_that_is_reached_by_other_ways_is_checked(
    kind: type[nn.Module], change: Callable[[float], None]
) -> None:
    torch.manual_seed(0)
    net, x = kind(), torch.randn(4, 8)
    planned = memplan.apply(copy.deepcopy(net), x, "1GiB", costs="estimate")
    for value in (1.0, 2.0, 1.0):
        change(value)
        assert all(map(torch.equal, gradients(net, x), gradients(planned, x)))


def test_other_names_and_attributes_that_are_not_read_do_not_count() -> None:
    global UNUSED
    net, x = Net(), torch.randn(4, 8)
    memplan.apply(net, x, "1GiB", costs="estimate", on_mismatch="raise")
    UNUSED, CONFIG.other, Options.unnamed = UNUSED + 1, 1, 2.0
    gradients(net, x)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_value_that_changes_in_each_step_makes_few_plans(
    change: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 8)
    planned = memplan.apply(copy.deepcopy(net), x, "1GiB", costs="estimate")
    with caplog.at_level(logging.INFO, "memplan"):
        for step in range(12):
            change(1.0 + step)
            assert all(map(torch.equal, gradients(net, x), gradients(planned, x)))
    assert sum(r.getMessage().startswith("planning, because") for r in caplog.records) <= 5
    if change is not set_flag:
        assert caplog.text.count("so what reads it runs unplanned") == 1


LOSSES: list[float] = []
VERBOSE = False


class Verbose(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        if VERBOSE:
            LOSSES.append(loss.item())
        return loss


def test_names_on_lines_that_do_not_run_do_not_count() -> None:
    torch.manual_seed(0)
    net, x = Verbose(), torch.randn(4, 8)
    planned = memplan.apply(copy.deepcopy(net), x, "1GiB", costs="estimate", on_mismatch="raise")
    for _ in range(3):
        assert all(map(torch.equal, gradients(net, x), gradients(planned, x)))
        LOSSES.append(1.0)
    set_global(2.0)  # a line that runs reads it
    with pytest.raises(memplan.PlanMismatch, match="SCALE is 2"):
        planned(x)


def test_a_debugger_goes_before_what_follows_lines() -> None:
    seen: list[str] = []

    def debugger(frame: Any, event: str, argument: Any) -> None:
        seen.append(event)

    net, x = Verbose(), torch.randn(4, 8)
    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        memplan.apply(net, x, "1GiB", costs="estimate")
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)
    assert seen


def test_what_is_too_large_to_compare_is_in_the_report() -> None:
    net, x = Net(), torch.randn(4, 8)
    memplan.apply(net, x, "1GiB", costs="estimate")
    plan = memplan.plan_of(net)
    assert isinstance(plan, memplan.Plan)
    assert plan.unchecked == (f"globals of {__name__}.LARGE",)
    assert "LARGE" in plan.report()


def test_what_bytecode_names() -> None:
    def outer(self: Any, x: Any) -> Any:
        import os.path

        Options.scale += 1
        inner = lambda y: y + SCALE + self.deep  # noqa: E731
        return self.layer(inner(x)), os.path.sep, CONFIG.scale.real, x.log()

    facts = facts_of_code(outer.__code__)
    assert {("Options", "scale"), ("SCALE",), ("CONFIG", "scale", "real")} <= facts.globals
    assert ("os.path",) in facts.imports
    assert {"layer", "deep"} <= facts.own
    assert {"log", "real", "scale"} <= facts.others


def test_names_of_installed_packages_are_numbers_and_flags_alone() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    state = NamedState(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, n_positions=8)))
    values = [value for _, table in state.tables for value in table.values()]
    assert values
    assert all(isinstance(value, (bool, int, float, str, type(None))) for value in values)


@pytest.mark.parametrize(
    ("folder", "compared"), [("site-packages", False), ("dist-packages/deeper", False), ("project", True)]
)
def test_installed_packages_lie_in_folders_of_any_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, compared: bool
) -> None:
    """Those of the user's own, of a system below a virtual environment, of Debian."""
    name = f"package_in_{folder.partition('-')[0]}"
    text = "from torch import nn\nTABLE = [1.0]\nclass Net(nn.Module):\n    def forward(self, x): return x * TABLE[0]\n"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / folder)
    tables = dict(NamedState(importlib.import_module(name).Net()).tables)
    assert ("TABLE" in {n for table in tables.values() for n in table}) == compared


UNSET = contextvars.ContextVar[torch.Tensor]("unset")


class SetsWhatWasNot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        UNSET.set(x.mean())
        return self.layer(x).pow(2).mean()  # type: ignore[no-any-return]


def test_context_variables_that_were_not_set_are_not_set_after_planning() -> None:
    net, x = SetsWhatWasNot(), torch.randn(4, 8)
    memplan.apply(net, x, "1GiB", costs="estimate")
    with pytest.raises(LookupError):
        UNSET.get()
    gradients(net, x)
    assert torch.equal(UNSET.get(), x.mean())


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = torch.tanh(self.layer(x)).split(lengths.tolist())
        return torch.stack([part.mean(0) for part in parts]).pow(2).mean()


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        with torch.no_grad():
            self.queue[int(self.pointer)] = x[0]
            self.pointer += 1
        return x.pow(2).mean()


@pytest.mark.parametrize("kind", [Ragged, Queue])
def test_numbers_that_forward_reads_and_that_change_make_few_plans(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = kind()
    planned = copy.deepcopy(net)

    def arguments(step: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        return (x, torch.tensor([1 + step % 9, 11 - step % 9])) if kind is Ragged else (x,)

    memplan.apply(planned, arguments(0), "1GiB", costs="estimate")
    with plannings() as reasons:
        for step in range(10):
            for one in (net, planned):
                one.zero_grad()
                one(*arguments(step)).backward()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), planned.parameters()))  # type: ignore[arg-type]
            assert all(map(torch.equal, net.buffers(), planned.buffers()))
    assert len(reasons) <= 4


@pytest.mark.parametrize("varies", [False, True])
def test_nested_tensors_are_planned_once(varies: bool) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x)).values().pow(2).mean()

    def batch(step: int) -> torch.Tensor:
        rows = [torch.randn(5 + (step % 3 if varies else 0), 8), torch.randn(9, 8)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    torch.manual_seed(0)
    net = Rows()
    planned = memplan.apply(copy.deepcopy(net), batch(0), "1GiB", costs="estimate")
    with plannings() as reasons:
        for step in range(6):
            x = batch(step)
            assert all(map(torch.equal, gradients(net, x), gradients(planned, x)))
    assert not reasons


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused_in_words() -> None:
    net, x = nn.Linear(8, 8), torch.nested.as_nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with pytest.raises(memplan.UnsupportedModel, match=r"layout=torch\.jagged"):
        memplan.apply(net, x, "1GiB", costs="estimate")


class _Tree(dict[str, Any]):
    """A config whose keys are attributes. Those that are missing are made."""

    def __getattr__(self, key: str) -> Any:
        return self[key]

    def __missing__(self, key: str) -> _Tree:
        self[key] = _Tree()
        return self[key]  # type: ignore[no-any-return]


def test_a_config_that_makes_its_keys_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.config = _Tree(width=8)  # type: ignore[assignment]
    memplan.apply(model, torch.randn(16, 4), "1GiB")
    model(torch.randn(16, 4)).sum().backward()
    assert model.config == {"width": 8}


class LazyTable(OrderedDict[str, Any]):
    """A table of classes as transformers has them: it imports what is asked for, and some of that is not installed."""

    def keys(self) -> Any:
        raise ValueError("a library is missing")

    values = items = __iter__ = keys


LAZY = LazyTable()


class ReadsLazyTable(nn.Module):
    table = LAZY

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(8, 8), [LAZY]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert "x" not in LAZY and "x" not in self.table and "x" not in self.own[0]
        return self.inner(x).relu()


def test_a_table_is_not_asked_for_what_it_does_not_hold() -> None:
    model = ReadsLazyTable()
    memplan.apply(model, torch.randn(4, 8), "1GiB", costs="estimate")
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    assert memplan.plan_of(model) is not None


class Deepest:
    def scale(self) -> float:
        return TABLE["factor"][0]  # type: ignore[no-any-return]


class Outer:
    inner: Any = None

    def scale(self) -> float:
        return self.inner.scale()  # type: ignore[no-any-return]


@pytest.mark.parametrize("home", ["attribute", "class", "container"])
def test_code_of_objects_that_nobody_names_is_followed(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are put together elsewhere: no code of the model names their classes."""
    outer = Outer()
    outer.inner = Outer()
    outer.inner.inner = Deepest()

    class Net(nn.Module):
        held: Any = outer if home == "class" else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = self.held["of"][0] if home == "container" else self.held
            return x * self.weight * held.scale()  # type: ignore[no-any-return]

    net, x = Net(), torch.randn(4)
    net.weight = nn.Parameter(torch.ones(4))
    if home != "class":
        net.held = {"of": [outer]} if home == "container" else outer
    memplan.apply(net, x, "1GiB", costs="estimate")
    for factor in (1.0, 0.5):
        monkeypatch.setitem(TABLE, "factor", [factor])
        assert torch.equal(net(x), x * factor)
