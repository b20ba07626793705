"""Whatever holds the tensors that forward returns: it comes back with those of this very run in it."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import AffineTransform, Categorical, Normal, TransformedDistribution
from torch.nn import functional as F

import memplan
from tests.support.zoo import assert_same_bits, copied


class Head:
    """Holds a tensor, and knows a loss of it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden, self.kept, self.function = hidden, deque([hidden * 2]), self.loss

    def loss(self) -> torch.Tensor:
        return self.hidden.pow(2).mean() + self.kept[0].mean()

    def __call__(self) -> torch.Tensor:
        return self.loss()


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Net(nn.Module):
    def __init__(self, returned: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.deep = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh())))
        self.scale, self.returned = nn.Linear(16, 16), returned

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.deep(x)
        return self.returned(hidden, F.softplus(self.scale(hidden)))


def _scaled(mean: torch.Tensor, scale: torch.Tensor) -> Any:
    return TransformedDistribution(
        Normal(torch.zeros_like(mean), torch.ones_like(mean)), [AffineTransform(mean, scale)]
    )


def _likelihood(found: Any) -> torch.Tensor:
    return found.rsample().pow(2).mean() + found.log_prob(torch.ones(64, 16)).mean()  # type: ignore[no-any-return]


# What forward returns; the loss of it; whether its tensors can be exchanged, so that a whole plan serves it.
HOLDERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], torch.Tensor], bool]] = {
    "distribution": (Normal, _likelihood, True),
    "distribution of parts": (_scaled, _likelihood, True),
    "lazy distribution": (lambda h, s: Categorical(logits=h), lambda d: d.entropy().mean() + d.probs.max(), True),
    "object": (lambda h, s: Head(h), lambda o: o.loss(), True),
    "method in an object": (lambda h, s: Head(h), lambda o: o.function(), True),
    "callable object": (lambda h, s: (s, Head(h)), lambda o: o[1]() + o[0].mean(), True),
    "method": (lambda h, s: (s, Head(h).loss), lambda o: o[1](), True),
    "partial": (lambda h, s: (s, functools.partial(F.mse_loss, h)), lambda o: o[1](torch.ones(64, 16)), True),
    "slots": (lambda h, s: (s, Slots(h)), lambda o: o[1].hidden.mean(), True),
    "deque": (lambda h, s: (s, deque([h])), lambda o: o[1][0].mean(), True),
    "closure": (lambda h, s: (s, lambda t: (h - t).pow(2).mean()), lambda o: o[1](1.0), False),
    "generator": (lambda h, s: (s, (h * i for i in range(3))), lambda o: torch.stack(list(o[1])).mean(), False),
    "map": (lambda h, s: (s, map(torch.sin, [h])), lambda o: torch.stack(list(o[1])).mean(), False),
    "iterator": (lambda h, s: (s, iter([h])), lambda o: torch.stack(list(o[1])).mean(), False),
    "values": (lambda h, s: (s, {"h": h}.values()), lambda o: torch.stack(list(o[1])).mean(), False),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_tensors_come_back_in_what_holds_them(holder: str) -> None:
    returned, loss_of, whole = HOLDERS[holder]
    torch.manual_seed(0)
    plain, xs = Net(returned), [torch.randn(64, 16) for _ in range(3)]
    net = copy.deepcopy(plain)
    memplan.apply(net, xs[0], memplan.Budget(activations=0.9) if whole else 1 << 20, costs="estimate")
    assert isinstance(memplan.plan_of(net), memplan.Plan) == whole
    for seed, x in enumerate(xs):
        results = []
        for model in (plain, net):
            torch.manual_seed(seed)
            model.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            results.append(copied([loss, *(p.grad for p in model.parameters())]))
        assert_same_bits(*results)


class Graph(nn.Module):
    """A graph network, whose adjacency is an argument or a buffer."""

    def __init__(self, adjacency: torch.Tensor | None = None) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(16, 16), nn.Tanh()))) for _ in "ab"
        )
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor | None = None) -> torch.Tensor:
        adjacency = self.adjacency if adjacency is None else adjacency
        return self.after(torch.sparse.mm(adjacency, self.before(torch.sparse.mm(adjacency, x))))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("buffer", [False, True], ids=["argument", "buffer"])
def test_sparse_tensors_run_unplanned(buffer: bool, layout: torch.layout) -> None:
    torch.manual_seed(0)
    dense = [torch.rand(64, 64).sub(0.9).relu() for _ in range(3)]
    adjacencies = [d.to_sparse(layout=layout) for d in dense]
    torch.manual_seed(0)
    plain = Graph(adjacencies[0] if buffer else None)
    torch.manual_seed(0)
    net = Graph(adjacencies[0] if buffer else None)
    calls = [(torch.randn(64, 16), *(() if buffer else (a,))) for a in adjacencies]
    memplan.apply(net, calls[0], memplan.Budget(activations=1.0), costs="estimate")
    assert memplan.plan_of(net) is None
    for call in calls:
        results = []
        for model in (plain, net):
            model.zero_grad()
            out = model(*call)
            out.pow(2).mean().backward()
            results.append(copied([out, *(p.grad for p in model.parameters())]))
        assert_same_bits(*results)


class Lazy(nn.Module):
    """Views whose memory is read as its negative or its conjugate, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.phase = nn.Linear(8, 8), nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> Any:
        hidden = torch.view_as_complex(self.layer(x).view(-1, 4, 2))
        parts = (hidden * self.phase).conj().imag, (hidden * turn.conj()).imag, -self.phase.conj().imag
        return sum(parts).cos(), hidden.sin().conj().imag, (hidden * 2).conj()  # type: ignore[call-overload]


@pytest.mark.parametrize("budget", [1.0, "min"])
def test_negative_and_conjugate_views(budget: Any) -> None:
    torch.manual_seed(2)
    plain = Lazy()
    planned = copy.deepcopy(plain)
    turns = [torch.randn(rows, 4, dtype=torch.cfloat) for rows in (3, 3, 5, 3)]
    batches = [(torch.randn(len(turn), 8), turn if i % 2 else turn.conj()) for i, turn in enumerate(turns)]
    memplan.apply(planned, batches[0], budget, costs="estimate", on_infeasible="min")
    for batch in batches:
        found = []
        for net in (plain, planned):
            net.zero_grad()
            outs = net(*batch)
            sum(o.abs().pow(2).sum() + (o * (1 + 2j)).imag.sum() for o in outs).backward()
            values = [o.detach().resolve_conj().resolve_neg() for o in outs]
            found.append((values, [(o.is_conj(), o.is_neg()) for o in outs], [p.grad for p in net.parameters()]))
        assert_same_bits(*found)
