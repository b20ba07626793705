"""Everything that a capture depended on is in the plan's key: a change is named, and changing it back works again."""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memplan
from tests.support.parameters import quickly
from tests.support.zoo import MODELS, assert_same_bits, copied


class Style(enum.Enum):
    PLAIN = 1
    LOUD = 2


class Keyed(nn.Module):
    """Reads settings from every kind of place that a Python program has."""

    scale = 1.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.outer = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.tied = nn.Linear(32, 8)
        self.tied.weight = self.outer.weight
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(32)
        self.plain, self.bare = nn.Linear(8, 8, bias=False), 1.0
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
        self.settings: dict[str, Any] = {"scale": 1.0, "deep": [{"power": 1.0}]}
        self.members = {1}
        self.factors = [1.0, [1.0]]
        self.style = Style.PLAIN
        self.config = SimpleNamespace(scale=1.0, inner=SimpleNamespace(scale=1.0), table={"scale": 1.0})
        self.tensors = [torch.ones(8)]
        self.held = torch.ones(8)
        self.register_buffer("mask", torch.ones(8))
        self.register_buffer("missing", None)

    def adjust(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(
        self, x: torch.Tensor, gate: Any = True, *, factor: Any = 1.0, other: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.drop(self.activation(self.norm(self.inner(x))))
        hidden = self.adjust(torch.tanh(self.middle(hidden)))
        out = self.plain(self.outer(hidden) + self.tied(hidden))
        for number in (
            self.scale, self.bare, self.settings["scale"], self.settings["deep"][0]["power"], len(self.members),
            self.factors[0], self.factors[1][0], self.config.scale, self.config.inner.scale, self.config.table["scale"],
            self.style.value, *self.tensors, self.held, self.mask,
        ):  # fmt: skip
            out = out * number
        if gate:
            out = out.sigmoid()
        if other is not None:
            out = out + other
        if self.missing is not None:
            out = out + self.missing
        return out.pow(2).mean() * float(getattr(factor, "value", factor))


def unplanned() -> tuple[Keyed, torch.Tensor]:
    torch.manual_seed(0)
    return Keyed().train(), torch.randn(64, 8)


@functools.cache
def smallest_plan() -> memplan.Plan:
    plan = memplan.explore(*unplanned(), costs="estimate")[0]
    assert plan.recomputed
    return plan


def planned() -> tuple[Keyed, torch.Tensor]:
    net, sample = unplanned()
    memplan.apply(net, sample, plan=smallest_plan(), on_mismatch="raise")
    return net, sample


@pytest.fixture(scope="module")
def planned_once() -> tuple[Keyed, torch.Tensor]:
    return planned()


@pytest.fixture
def keyed(planned_once: tuple[Keyed, torch.Tensor]) -> tuple[Keyed, torch.Tensor]:
    """A planned model and its sample; a change is tried on it and taken back.

    It has been called before: later calls are checked by quicker looks, which must see all changes, too.
    """
    net, sample = planned_once
    for _ in range(3):
        outcome(net, lambda: net(sample))
    return planned_once


def outcome(net: nn.Module, run: Callable[[], torch.Tensor]) -> Any:
    """Loss, gradients, buffers and generator after one step from a fixed state; the state is put back."""
    state = copy.deepcopy(dict(net.state_dict()))
    net.zero_grad()
    torch.manual_seed(1)
    loss = run()
    loss.backward()
    result = copied([loss.detach(), [p.grad for p in net.parameters()], list(net.buffers()), torch.get_rng_state()])
    net.zero_grad()
    net.load_state_dict(state)
    return result


Change = Callable[[Any], AbstractContextManager[Any]]


def setting(path: str, value: Any) -> Change:
    """Set an attribute for a while."""

    @contextmanager
    def change(net: Any) -> Iterator[None]:
        *parents, leaf = path.split(".")
        thing = net
        for name in parents:
            thing = getattr(thing, name)
        tables = [vars(thing)]
        if isinstance(thing, nn.Module):
            tables += [thing._parameters, thing._buffers, thing._modules]
        present = leaf == "__class__" or any(leaf in table for table in tables)
        old = getattr(thing, leaf, None)
        setattr(thing, leaf, value() if isinstance(value, _Made) else value)
        try:
            yield
        finally:
            if present:
                setattr(thing, leaf, old)
            else:
                delattr(thing, leaf)

    return change


class _Made:
    """A value that is made when it is set."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        return self.make()


def item(find: Callable[[Any], Any], key: Any, value: Any) -> Change:
    """Set an element of a container for a while."""

    @contextmanager
    def change(net: Any) -> Iterator[None]:
        container = find(net)
        old = container[key]
        container[key] = value
        try:
            yield
        finally:
            container[key] = old

    return change


@contextmanager
def more_members(net: Any) -> Iterator[None]:
    net.members.add(2)
    yield
    net.members.discard(2)


@contextmanager
def class_attribute(net: Any) -> Iterator[None]:
    type(net).scale = 2.0
    yield
    type(net).scale = 1.0


@contextmanager
def in_eval(net: Any) -> Iterator[None]:
    net.drop.eval()
    yield
    net.drop.train()


@contextmanager
def frozen(net: Any) -> Iterator[None]:
    net.middle.weight.requires_grad_(False)
    yield
    net.middle.weight.requires_grad_(True)


@contextmanager
def retyped(net: Any) -> Iterator[None]:
    old = net.middle.weight.data
    net.middle.weight.data = old.double()
    yield
    net.middle.weight.data = old


@contextmanager
def restrided(net: Any) -> Iterator[None]:
    old = net.middle.weight.data
    net.middle.weight.data = old.t().contiguous().t()
    yield
    net.middle.weight.data = old


@contextmanager
def more_modules(net: Any) -> Iterator[None]:
    net.extra = nn.Identity()
    yield
    del net.extra


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def another_config() -> SimpleNamespace:
    return SimpleNamespace(scale=2.0, inner=SimpleNamespace(scale=1.0), table={"scale": 1.0})


MODEL_CHANGES: dict[str, tuple[Change, str]] = {
    "dropout-p": (setting("drop.p", 0.5), r"drop\.p is 0\.5, planned for 0\.2"),
    "norm-eps": (setting("norm.eps", 1e-3), r"norm\.eps"),
    "norm-momentum": (setting("norm.momentum", None), r"norm\.momentum"),
    "submodule-in-eval": (in_eval, "module drop is in eval mode"),
    "parameter-dtype": (retyped, r"middle\.weight is torch\.float64"),
    "parameter-strides": (restrided, r"middle\.weight is .*strides \(1, 32\)"),
    "requires-grad": (frozen, r"middle\.weight is"),
    "submodule-of-another-class": (setting("middle.__class__", Doubled), "module middle is of another class, Doubled"),
    "submodule-exchanged": (setting("middle", _Made(lambda: nn.Linear(32, 32))), "submodules of the model"),
    "submodule-added": (more_modules, "submodules of the model"),
    "untied": (setting("tied.weight", _Made(lambda: nn.Parameter(torch.ones(8, 32)))), r"tied\.weight|outer\.weight"),
    "bias-gone": (setting("middle.bias", None), r"middle\.bias"),
    "bias-came": (setting("plain.bias", _Made(lambda: nn.Parameter(torch.ones(8)))), r"plain\.bias"),
    "buffer-came": (setting("missing", _Made(lambda: torch.ones(8))), "missing"),
    "attribute": (setting("bare", 2.0), r"bare is 2\.0, planned for 1\.0"),
    "attribute-type": (setting("bare", 1), "bare"),
    "attribute-shadows-class": (setting("scale", 2.0), "scale"),
    "class-attribute": (class_attribute, "scale"),
    "callable": (setting("activation", F.relu), "activation"),
    "method-shadowed": (setting("adjust", lambda x: x * 2), "adjust"),
    "forward-of-a-submodule": (setting("middle.forward", lambda x: x), r"middle(\.forward)?"),
    "dict": (item(lambda n: n.settings, "scale", 2.0), "settings"),
    "dict-of-lists-of-dicts": (item(lambda n: n.settings["deep"][0], "power", 2.0), "settings"),
    "list": (item(lambda n: n.factors, 0, 2.0), "factors"),
    "list-of-lists": (item(lambda n: n.factors[1], 0, 2.0), "factors"),
    "set": (more_members, "members"),
    "enum": (setting("style", Style.LOUD), "style"),
    "config": (setting("config.scale", 2.0), r"config\.scale is 2\.0"),
    "config-inside": (setting("config.inner.scale", 2.0), "config"),
    "config-dict": (item(lambda n: n.config.table, "scale", 2.0), "config"),
    "config-object": (setting("config", _Made(another_config)), "config"),
    "tensor-attribute": (setting("held", _Made(lambda: torch.ones(8) * 2)), "held"),
    "tensor-in-a-list": (item(lambda n: n.tensors, 0, torch.ones(8) * 2), "tensors"),
    "buffer-shape": (setting("mask", _Made(lambda: torch.ones(1))), "mask is"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODEL_CHANGES)
def test_a_change_of_the_model_is_named(keyed: tuple[nn.Module, torch.Tensor], name: str) -> None:
    net, sample = keyed
    change, words = MODEL_CHANGES[name]
    before = outcome(net, lambda: net(sample))
    with change(net), pytest.raises(memplan.PlanMismatch, match=words):
        net(sample)
    assert_same_bits(before, outcome(net, lambda: net(sample)))


def deterministic(mode: bool) -> Change:
    @contextmanager
    def change(_: Any) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(mode)
        yield
        torch.use_deterministic_algorithms(before)

    return change


@contextmanager
def precise(_: Any) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@contextmanager
def recommended(_: Any) -> Iterator[None]:
    """The setting that takes the place of `torch.set_float32_matmul_precision`, which can't be read beside it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    yield
    matmul.fp32_precision = before


@contextmanager
def preferring_math(_: Any) -> Iterator[None]:
    backends = [nn.attention.SDPBackend.MATH, *sdpa_backends()]
    with nn.attention.sdpa_kernel(backends, set_priority=True):
        yield


def sdpa_backends() -> list[nn.attention.SDPBackend]:
    """All that are allowed unless somebody says otherwise, but the math."""
    kinds = nn.attention.SDPBackend
    return [kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION, kinds.CUDNN_ATTENTION]


@contextmanager
def default_dtype(_: Any) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, tuple[Change, str]] = {
    "autocast": (lambda _: torch.autocast("cpu", torch.bfloat16), "autocast is torch.bfloat16 on cpu, planned for off"),
    "deterministic": (deterministic(True), "deterministic algorithms is True"),
    "math-only": (lambda _: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH), "sdp is"),
    "matmul-precision": (precise, "float32 precision of cuda matmul is tf32"),
    "precision-as-recommended": (recommended, "float32 precision of cuda matmul is tf32"),
    "cudnn": (lambda _: torch.backends.cudnn.flags(enabled=False), "cudnn is False"),
    "order-of-kernels": (preferring_math, "order of sdp backends is"),
    "default-dtype": (default_dtype, "default dtype is torch.float64"),
    "mkldnn": (lambda _: torch.backends.mkldnn.flags(enabled=False), "mkldnn is False"),
}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_change_of_the_surroundings_is_named(keyed: tuple[nn.Module, torch.Tensor], name: str) -> None:
    net, sample = keyed
    change, words = SURROUNDINGS[name]
    before = outcome(net, lambda: net(sample))
    with change(net), pytest.raises(memplan.PlanMismatch, match=words):
        net(sample)
    assert_same_bits(before, outcome(net, lambda: net(sample)))


def test_a_plan_made_under_autocast_is_for_that_dtype() -> None:
    torch.manual_seed(0)
    net, sample = Keyed(), torch.randn(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        memplan.apply(net, sample, 1.0, costs="estimate", on_mismatch="raise")
        net(sample).backward()
    with torch.autocast("cpu", torch.float16), pytest.raises(memplan.PlanMismatch, match=r"autocast is torch\.float16"):
        net(sample)
    with pytest.raises(memplan.PlanMismatch, match=r"autocast is off, planned for torch\.bfloat16"):
        net(sample)
    with (
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        pytest.raises(memplan.PlanMismatch, match="autocast"),
    ):
        net(sample)


# -- arguments --------------------------------------------------------------------------------------------------------

WRONG_CALLS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "batch": (lambda net, x: net(x[:32].clone()), r"x is .*\(32, 8\)"),
    "dtype": (lambda net, x: net(x.double()), "x is torch.float64"),
    "strides": (lambda net, x: net(x.t().contiguous().t()), r"x is .*strides \(1, 64\)"),
    "requires-grad": (lambda net, x: net(x.clone().requires_grad_()), "x is .*requires grad"),
    "device": (lambda net, x: net(x.to("meta")), "x is .*meta"),
    "value": (lambda net, x: net(x, False), "gate"),
    "keyword": (lambda net, x: net(x, factor=2.0), "factor"),
    "new-tensor": (lambda net, x: net(x, other=x), "other"),
    "no-tensor": (lambda net, x: net(3.0), "x is a float"),
    "list-instead": (lambda net, x: net([x]), "x"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_call_with_other_arguments_is_named(keyed: tuple[nn.Module, torch.Tensor], name: str) -> None:
    net, sample = keyed
    wrong, words = WRONG_CALLS[name]
    before = outcome(net, lambda: net(sample))
    with pytest.raises(memplan.PlanMismatch, match=words):
        wrong(net, sample)
    assert_same_bits(before, outcome(net, lambda: net(sample)))


@pytest.mark.parametrize(
    ("planned", "given"), [(True, 1), (1.0, 1), (2.0, 3.0), ("a", "b"), (None, 1.0), ((1, 2), (1, 3)), ((1, 2), [1, 2])]
)
def test_python_arguments_are_compared_by_type_and_value(planned: Any, given: Any) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, setting: Any) -> torch.Tensor:
            return self.layer(x).pow(2).mean()

    net, sample = Takes(), torch.randn(4, 8)
    memplan.apply(net, (sample, planned), 1.0, costs="estimate", on_mismatch="raise")
    net(sample, planned).backward()
    with pytest.raises(memplan.PlanMismatch, match="setting"):
        net(sample, given)


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("kind", ["object", "tensor-in-object", "set", "array"])
def test_an_argument_that_changes_inside_is_noticed(kind: str) -> None:
    """A mutable argument that pytree does not open is refused, or compared by content."""
    import numpy as np

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, thing: Any) -> torch.Tensor:
            factor = (
                thing.value if isinstance(thing, Box) else len(thing) if isinstance(thing, set) else float(thing[0])
            )
            return (self.layer(x) * factor).pow(2).mean()

    thing, change = {
        "object": lambda: (b := Box(1.0), lambda: setattr(b, "value", 2.0)),
        "tensor-in-object": lambda: (b := Box(torch.ones(8)), lambda: setattr(b, "value", torch.ones(8) * 2)),
        "set": lambda: (b := {1}, lambda: b.add(2)),
        "array": lambda: (b := np.ones(2), lambda: b.fill(2)),
    }[kind]()
    net, sample = Takes(), torch.randn(4, 8)
    try:
        memplan.apply(net, (sample, thing), 1.0, costs="estimate", on_mismatch="raise")
    except memplan.UnsupportedModel as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "thing" in refusal
        return
    before = net(sample, thing).item()
    change()
    try:
        after = net(sample, thing).item()
    except memplan.PlanMismatch:
        return
    assert after == memplan.remove(net)(sample, thing).item() != before


def test_inputs_that_share_memory() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return (self.layer(x) * self.layer(y)).mean()

    torch.manual_seed(0)
    net, plain = Writes(), Writes()
    plain.load_state_dict(net.state_dict())
    memplan.apply(net, (torch.randn(4, 8), torch.randn(4, 8)), 1.0, costs="estimate", on_mismatch="raise")
    same = torch.randn(4, 8)
    with pytest.raises(memplan.PlanMismatch, match="share memory"):
        net(same, same)
    base = torch.randn(8, 8)
    memplan.apply(net, (base[:4], base[4:]), 1.0, costs="estimate", on_mismatch="raise")
    for first, second in ((base[:4], base[4:]), (base[:4], base[:4]), (base[:4], base[2:6])):
        copies = copied(base)
        views = [copies.as_strided(v.shape, v.stride(), v.storage_offset()) for v in (first, second)]
        expected = plain(*views)
        copies = copied(base)
        views = [copies.as_strided(v.shape, v.stride(), v.storage_offset()) for v in (first, second)]
        try:
            got = net(*views)
        except memplan.PlanMismatch:
            assert second.storage_offset() != 32, "the planned case itself is no mismatch"
        else:
            assert_same_bits(expected.detach(), got.detach())


@pytest.mark.parametrize("name", quickly(("gpt2", "llama", "bert"), "llama"))
def test_a_padded_mask_is_another_step_than_a_full_one(name: str) -> None:
    net, sample = MODELS[name](0)
    full, padded = torch.ones(2, 64, dtype=torch.long), torch.ones(2, 64, dtype=torch.long)
    padded[1, 40:] = 0
    plain = copy.deepcopy(net)
    for planned_for, other in ((full, padded), (padded, full)):
        memplan.apply(net, {**sample, "attention_mask": planned_for}, 1.0, costs="estimate", on_mismatch="raise")
        expected = outcome(plain, lambda mask=planned_for: plain(**sample, attention_mask=mask).loss)
        assert_same_bits(expected, outcome(net, lambda mask=planned_for: net(**sample, attention_mask=mask).loss))
        expected = outcome(plain, lambda mask=other: plain(**sample, attention_mask=mask).loss)
        try:
            got = outcome(net, lambda mask=other: net(**sample, attention_mask=mask).loss)
        except memplan.PlanMismatch:
            continue
        assert_same_bits(expected, got)
    more = padded.clone()
    more[0, 60:] = 0
    expected = outcome(plain, lambda: plain(**sample, attention_mask=more).loss)
    memplan.apply(net, {**sample, "attention_mask": padded}, 1.0, costs="estimate", on_mismatch="raise")
    assert_same_bits(expected, outcome(net, lambda: net(**sample, attention_mask=more).loss), "another padding")


def test_a_changed_config_of_a_library_model() -> None:
    net, sample = MODELS["gpt2"](0)
    memplan.apply(net, sample, 1.0, costs="estimate", on_mismatch="raise")
    before = outcome(net, lambda: net(**sample).loss)
    net.config.return_dict = False
    with pytest.raises(memplan.PlanMismatch, match="config"):
        net(**sample)
    net.config.return_dict = True
    assert_same_bits(before, outcome(net, lambda: net(**sample).loss))
    with pytest.raises(memplan.PlanMismatch, match="arguments are"):
        net(**sample, output_hidden_states=True)


# -- what must not disturb a plan -------------------------------------------------------------------------------------


def swap_data(net: nn.Module) -> None:
    for p in net.parameters():
        p.data = p.detach().clone() * 1.5


def optimizer_steps(net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    optimizer.zero_grad()


def new_parameter_object(net: Any) -> None:
    net.middle.weight = nn.Parameter(net.middle.weight.detach() * 2)


def in_eval_and_back(net: nn.Module) -> None:
    net.eval()
    net(torch.ones(3, 8)).backward()
    with torch.no_grad():
        net(torch.ones(5, 8))
    net.train()
    net.zero_grad()


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "load-state-dict": lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}),
    "swap-data": swap_data,
    "optimizer": optimizer_steps,
    "new-parameter": new_parameter_object,
    "eval": in_eval_and_back,
    "zero-grad": lambda net: net.zero_grad(set_to_none=False),
    "to-same": lambda net: net.to("cpu", torch.float32),
    "apply-init": lambda net: net.apply(
        lambda m: nn.init.constant_(m.weight, 0.1) if isinstance(m, nn.Linear) else None
    ),
    "new-attribute": lambda net: setattr(net, "epoch", 3),
    "share-memory": lambda net: net.share_memory(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_changes_keep_the_plan(name: str) -> None:
    net, sample = planned()
    plain = copy.deepcopy(net)
    for each in (plain, net):
        HARMLESS[name](each)
    expected = outcome(plain, lambda: plain(sample))
    assert_same_bits(expected, outcome(net, lambda: net(sample)))
    assert memplan.plan_of(net) is not None
