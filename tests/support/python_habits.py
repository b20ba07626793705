"""Modules that are made of Python habits, at random, and a record of every Python object that a step may have changed.

`program(seed)` is the source of a file with a model, its arguments, and what its training loop does between steps. It
is imported once for each run, so that globals, classes and closures are those of one run alone.
"""

from __future__ import annotations

import contextvars
import dataclasses
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memplan

_HEAD = """
import contextvars, random, threading, types
from collections import deque
import numpy as np
import torch
from torch import nn

LOG, STATS, NAMES, RECENT = [], {"calls": 0}, set(), deque(maxlen=3)
SCALE, STEP, LAST, FLAG = 1.5, 0, None, False
CONFIG = types.SimpleNamespace(scale=0.5, last=None, inner={"deep": [1.0]})
LOCAL, CONTEXT = threading.local(), contextvars.ContextVar("context", default=None)
LOCAL.value = 0


class Slotted:
    __slots__ = ("value", "count")

    def __init__(self):
        self.value, self.count = None, 0


SLOTTED = Slotted()


class Registry:
    total, seen, factor = 0, [], 1.25

    @classmethod
    def note(cls, x):
        cls.total += 1
        cls.seen.append(x.detach().mean())


def counting():
    count, seen, factor = 0, [], 0.75

    def inner(x):
        nonlocal count
        count += 1
        seen.append(count)
        return x * factor

    def pure(x):
        return x * factor + 1

    def reset(value):
        nonlocal factor
        factor = value

    return inner, pure, reset


COUNTED, PURE, RESET = counting()


def helper(x):
    return torch.sin(x) * SCALE if not FLAG else torch.cos(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Appends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(grad.detach().clone())
        return grad, None


class Scaled(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * Scaled.scale


class Counts(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counts.calls += 1
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        STATS["backward"] = STATS.get("backward", 0) + 1
        return grad


class WritesGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x @ layer.weight.detach().t()

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.layer.weight
        new = grad.t() @ x
        weight.grad = new if weight.grad is None else weight.grad.add_(new)
        return grad @ weight.detach(), None


class HalvesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clone().mul_(0.5)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.history, self.calls = nn.Linear(8, 8), [], 0

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Tells(Inner):
    def forward(self, x):
        self.calls += 1
        self.history.append(x.detach().mean())
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.tells = Inner(), Inner(), Inner(), Tells()
        self.log, self.stats, self.count, self.flag, self.last = [], {"n": 0}, 0, True, None
        self.cache, self.kept, self.fixed = {}, None, 2.0
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(4, 8))
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(8)
        SETUP

    def helped(self, x):
        return x * self.fixed + helper(x)

    def forward(self, x, extra):
        global STEP, LAST
        x = self.a(x)
"""

# What a forward may do, one habit a line. `x` is an activation of shape (6, 8), `extra` a dict that the caller passes.
HABITS: dict[str, tuple[str, ...]] = {
    "containers": (
        "self.log.append(x.mean())",
        "self.log.append(3)",
        "self.stats['n'] += 1",
        "self.stats[f'key{len(self.stats)}'] = 1",
        "LOG.append(x.detach().mean())",
        "LOG.append(len(LOG))",
        "STATS['calls'] += 1",
        "STATS['mean'] = x.mean()",
        "NAMES.add(len(NAMES))",
        "RECENT.append(x.detach().sum())",
        "CONFIG.inner['deep'].append(2.0)",
        "x = x * CONFIG.inner['deep'][0]",
        "x = x * self.cache.setdefault('table', torch.arange(8.0))",
        "self.log[:] = [x.detach().max()]",
    ),
    "attributes": (
        "self.last = x.detach()",
        "self.last = x.mean()",
        "self.count += 1",
        "self.count += 1; x = x * self.count",
        "self.flag = not self.flag",
        "x = x + 1 if self.flag else x - 1; self.flag = not self.flag",
        "CONFIG.last = x.detach().mean()",
        "x = x * CONFIG.scale",
        "CONFIG.scale = CONFIG.scale * 0.5",
        "type(self).made = getattr(type(self), 'made', 0) + 1",
        "self.kept = x.detach() if self.kept is None else self.kept * 0.5 + x.detach()",
        "x = x if self.last is None else x + self.last.detach().mean(); self.last = x.detach()",
        "setattr(self, f'dynamic{self.count}', 1); self.count += 1",
        "Registry.note(x)",
        "Registry.total += 1",
        "x = x * Registry.factor",
        "SLOTTED.value = x.detach().mean()",
        "SLOTTED.count += 1",
        "LOCAL.value = x.mean()",
        "LOCAL.value += 1",
        "CONTEXT.set(x.mean())",
        "x = x if CONTEXT.get() is None else x * 2",
        "self.linear_in = self.a.linear",
        "x.note = 'seen'",
    ),
    "globals": (
        "STEP += 1",
        "STEP += 1; x = x * STEP",
        "LAST = x.detach().mean()",
        "LAST = x.mean()",
        "x = x * SCALE",
        "x = helper(x)",
        "x = self.helped(x)",
        "x = x + 1 if FLAG else x - 1",
        "x = x if LAST is None else x + LAST.detach(); LAST = x.detach().mean()",
    ),
    "closures": (
        "x = COUNTED(x)",
        "x = PURE(x)",
        "x = (lambda y, s=self.fixed: y * s)(x)",
        "x = (lambda y: LOG.append(y.detach().min()) or y)(x)",
    ),
    "hooks": (
        "x = x * 1; x.register_hook(lambda grad: grad * 2)",
        "x = x * 1; x.register_hook(LOG.append)",
        "x = x * 1; x.retain_grad(); self.last = x",
        "x = x * 1; x.register_hook(lambda grad: LOG.append(grad.sum()))",
        "self.b.register_forward_hook(lambda m, i, o: o * 2).remove()",
    ),
    "in place": (
        "x = x * 1; x.mul_(0.5)",
        "x = x * 1; x += 1",
        "x = x * 1; x[:, 0] = 0",
        "x = x * 1; x[:, 1:].add_(1)",
        "x = x * 1; x.t_().t_()",
        "self.total.add_(x.detach().sum(0))",
        "self.total += x.detach().sum(0); x = x + self.total * 0.01",
        "self.total.copy_(x.detach()[0])",
        "self.total = self.total * 0.9 + x.detach().mean(0) * 0.1",
        "self.queue[1:3] = x.detach()[:2]",
        "x = x * 1; x.data = x.data.sign()",
        "x = x * 1; x.detach().mul_(2)",
        "self.total.data.add_(1)",
        "y = torch.empty(0); torch.mul(x.detach(), 2, out=y); x = x + y",
        "x = x.unsqueeze(0).squeeze_(0)",
    ),
    "views": (
        "x = x.view(2, 3, 8).transpose(0, 1).reshape(6, 8)",
        "x = torch.cat(x.split([2, 4]))",
        "x = x.expand(6, 8).contiguous()",
        "x = torch.stack([row for row in x])",
    ),
    "numbers": (
        "self.queue[int(self.pointer)] = x.detach()[0]; self.pointer.copy_((self.pointer + 1) % 4)",
        "x = x * float(extra['number'])",
        "x = x * int(self.pointer)",
        "x = x + x.shape[0]",
        "x = x * float(extra['mask'].sum())",
        "self.log.append(float(x.detach().mean()))",
        "LOG.append(x.mean().item())",
        "x = torch.cat([part * 2 for part in x.split(extra['lengths'].tolist())])",
        "x = x[extra['mask'] > 0].sum() + x",
    ),
    "branches": (
        "x = x * 2 if bool(extra['mask'].all()) else x",
        "x = x * 2 if x.sum() > 0 else x * 3",
        "x = x * 2 if extra['kind'] == 'a' else x * 3",
        "x = self.c(x) if self.training else x",
        "x = self.c(x) if extra['step'] % 2 else x",
        "x = self.c(x) if torch.rand(()) < 0.5 else x",
        "try:\n            raise KeyError(x.shape)\n        except KeyError:\n            x = x + 1",
    ),
    "random": (
        "x = self.drop(x)",
        "x = x + torch.rand_like(x)",
        "x = x * random.random()",
        "x = x + float(np.random.rand())",
        "x = x + torch.rand(8, generator=self.generator)",
        "x = torch.nn.functional.dropout(x, 0.1)",
        "x = x * torch.randint(1, 3, ()).item()",
    ),
    "functions": (
        "x = Square.apply(x)",
        "x = Appends.apply(x, LOG)",
        "x = Appends.apply(x, self.log)",
        "x = Scaled.apply(x)",
        "x = Counts.apply(x)",
        "x = WritesGrad.apply(x, self.b.linear)",
        "x = HalvesInPlace.apply(x)",
    ),
    "arguments": (
        "extra['aux'] = x.mean()",
        "extra['count'] = extra.get('count', 0) + 1",
        "extra['list'].append(x.detach().mean())",
        "extra['list'].append(1)",
        "x = x * extra['weight']",
        "extra['weight'].requires_grad_(); x = x * extra['weight']",
        "extra['weight'].mul_(0.5)",
    ),
    "autograd": (
        "x.sub(0.5).pow(2).mean().backward(retain_graph=True)",
        "with torch.no_grad():\n            self.total.add_(1)",
        "self.b.linear.weight.requires_grad_(False)",
        "x = x + torch.autograd.grad(x.pow(2).sum(), x, create_graph=True)[0] * 0.1",
        "x = self.norm(x)",
    ),
    "modules": (
        "x = self.b(x)",
        "x = self.tells(x)",
        "x = self.c(self.b(x))",
        "x = torch.utils.checkpoint.checkpoint(self.b, x, use_reentrant=False)",
    ),
}

_SETUPS = (
    "pass",
    "pass",
    "pass",
    "self.b.register_forward_hook(lambda m, i, o: LOG.append(o.detach().mean()))",
    "self.b.register_forward_hook(lambda m, i, o: o * 2)",
    "self.b.register_forward_pre_hook(lambda m, i: (i[0] + 1,))",
    "self.b.register_full_backward_hook(lambda m, gi, go: LOG.append(go[0].detach().sum()))",
    "self.a.linear.weight.register_hook(lambda grad: grad * 0.5)",
    "self.c.forward = types.MethodType(lambda self, x: torch.relu(self.linear(x)), self.c)",
)

_RETURNS = ("x.pow(2).mean()", "x", "{'loss': x.pow(2).mean(), 'x': x}", "(x, x.mean(0).detach())", "x.view_as(x)")

# What a loop does before a step, with the file as `m`, the model as `net` and the number of the step as `step`.
_LOOPS = (
    "pass",
    "pass",
    "m.SCALE = 1.0 + step",
    "m.FLAG = step >= 2",
    "m.CONFIG.scale = 0.5 * (step + 1)",
    "m.Registry.factor = 1.0 + step",
    "m.Scaled.scale = 0.25 * (step + 1)",
    "m.RESET(0.5 + step)",
    "m.LOG.clear()",
    "net.fixed = 2.0 + step // 2",
    "m.CONTEXT.set(None if step < 2 else 1)",
)


def program(seed: int) -> str:
    """The source of a file: `Net`, `make_arguments(step)` and `before(m, net, step)`."""
    draw = random.Random(seed)
    lines = []
    for _ in range(draw.randint(1, 3)):
        lines.append(draw.choice(HABITS[draw.choice(list(HABITS))]))
        if draw.random() < 0.5:
            lines.append(f"x = self.{draw.choice('bc')}(x)")
    source = _HEAD.replace("SETUP", draw.choice(_SETUPS)) + "".join(f"        {line}\n" for line in lines)
    source += f"        return {draw.choice(_RETURNS)}\n\n\n"
    source += "def before(m, net, step):\n"
    source += "".join(f"    {draw.choice(_LOOPS)}\n" for _ in range(2))
    return source + _TAIL


_TAIL = """

def make_arguments(step):
    torch.manual_seed(100 + step)
    extra = {
        "number": torch.tensor(1.0 + step % 2), "mask": torch.ones(6), "lengths": torch.tensor([2, 4]),
        "kind": "a" if step < 3 else "b", "step": 0, "list": [], "weight": torch.ones(8),
    }
    return torch.randn(6, 8), extra


def backward(out):
    losses = list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple) else [out]
    loss = losses[0] if losses[0].dim() == 0 else losses[0].pow(2).mean()
    loss.backward()
"""


def loaded(source: str, folder: Path, name: str) -> types.ModuleType:
    """The file as a module of this name."""
    path = folder / f"{name}.py"
    path.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), vars(module))
    return module


def record(*things: Any) -> Any:
    """Everything that is reached from these objects, as values that can be compared: tensors by their bits."""
    return [_record(thing, {}, 0) for thing in things]


_HIDDEN = ("forward", "__builtins__", "__file__", "__name__", "__cached__", "__warningregistry__")


def _record(thing: Any, seen: dict[int, Any], depth: int) -> Any:
    if isinstance(thing, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
        return f"{type(thing).__name__} {thing!r}"
    if id(thing) in seen:
        return f"number {seen[id(thing)][0]}"
    seen[id(thing)] = len(seen), thing  # which stays alive, or another could have its id
    if isinstance(thing, torch.Tensor):
        return _record_tensor(thing, seen, depth)
    if isinstance(thing, torch.Generator):
        return thing.get_state().tolist()
    if isinstance(thing, (types.ModuleType, types.BuiltinFunctionType)) and depth:
        return "module or builtin"
    if isinstance(thing, (list, tuple, deque)):
        return [type(thing).__name__, *(_record(v, seen, depth + 1) for v in thing)]
    if isinstance(thing, (set, frozenset)):
        return sorted(map(repr, thing))
    if isinstance(thing, Mapping):
        return [(repr(k), _record(v, seen, depth + 1)) for k, v in thing.items() if k not in _HIDDEN]
    if isinstance(thing, contextvars.ContextVar):
        return _record(thing.get(None), seen, depth + 1)
    if isinstance(thing, types.FunctionType):
        cells = thing.__closure__ or ()
        return [thing.__qualname__, *(_record(cell.cell_contents, seen, depth + 1) for cell in cells)]
    if isinstance(thing, type):
        plain = {k: v for k, v in vars(thing).items() if not k.startswith("__") and not callable(v)}
        own = thing.__module__.startswith("habits_")
        return [thing.__qualname__, _record(plain, seen, depth + 1)] if own else thing.__qualname__
    return [type(thing).__qualname__, *_attributes(thing, seen, depth)]


def _record_tensor(tensor: torch.Tensor, seen: dict[int, Any], depth: int) -> Any:
    data = tensor.detach()
    bits = data.contiguous().view(torch.uint8).tolist() if data.dim() and data.numel() else repr(data)
    attributes = dict(vars(tensor)) if type(tensor) is torch.Tensor else {}
    grad = tensor.grad if tensor.is_leaf else None
    return [
        type(tensor).__name__, str(data.dtype), tuple(data.shape), bits, tensor.requires_grad,
        _record(grad, seen, depth + 1), _record(attributes, seen, depth + 1),
    ]  # fmt: skip


def _attributes(thing: Any, seen: dict[int, Any], depth: int) -> Iterator[Any]:
    for name in [n for kind in type(thing).__mro__ for n in _slots(kind)]:
        yield name, _record(getattr(thing, name, None), seen, depth + 1)
    attributes = dict(getattr(thing, "__dict__", {}))
    if isinstance(thing, nn.Module):
        hooks = [key for key in attributes if key.endswith("_hooks")]
        attributes.update({key: list(attributes[key].values()) for key in hooks})
        attributes.pop("forward", None)
    yield _record(attributes, seen, depth + 1)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(s for s in slots if not s.startswith("__"))


@dataclasses.dataclass
class Steps:
    """What a program's steps gave.

    - records: of everything, one for each step.
    - refusal: why memplan planned or ran no more of them; "" where it ran them all.
    - error: what the program itself raised; "" where it raised nothing.
    """

    records: list[Any]
    refusal: str = ""
    error: str = ""


def run_program(seed: int, folder: Path, plan: Callable[[nn.Module, Any], nn.Module], count: int = 4) -> Steps:
    """Run steps of a program. plan: plans the model for the arguments of the first step, and gives the one that runs.

    Raises AssertionError where a refusal leaves anything changed.
    """
    file, steps = loaded(program(seed), folder, "habits_file"), Steps([])
    _seed(0)
    net, arguments = file.Net(), file.make_arguments(0)
    before = record(net, vars(file), random.getstate(), torch.get_rng_state())
    try:
        net = plan(net, arguments)
    except memplan.MemplanError as error:
        steps.refusal = str(error)
        assert difference(before, record(net, vars(file), random.getstate(), torch.get_rng_state())) is None
        return steps
    for number in range(count):
        file.before(file, net, number)
        x, extra = file.make_arguments(number)
        if seed % 3:
            net.zero_grad(set_to_none=True)
        _seed(number)
        try:
            out = net(x, extra)
            file.backward(out)
        except memplan.MemplanError as error:
            steps.refusal = str(error)
            return steps
        except Exception as error:
            own = str(error).startswith("memplan:")
            steps.refusal, steps.error = (str(error), "") if own else ("", f"{type(error).__name__}: {error}")
            return steps
        generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        steps.records.append(record(out, net, extra, x, vars(file), *generators))
    return steps


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def difference(a: Any, b: Any, path: str = "") -> str | None:
    """Where two records differ first, in words; None where they do not."""
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} values, the last ones {str(a)[-80:]} and {str(b)[-80:]}"
        named = isinstance(a, tuple) and len(a) == 2 and isinstance(a[0], str)
        steps = (f"{path}.{a[0]}" if named else f"{path}.{i}" for i in range(len(a)))
        found = (difference(x, y, step) for x, y, step in zip(a, b, steps))
        return next((where for where in found if where is not None), None)
    return None if a == b else f"{path}: {str(a)[:80]} and {str(b)[:80]}"
