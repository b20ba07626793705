"""Errors that forward raises by itself arrive as they are, with or without a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memplan

WIDTH = 16


class OwnError(Exception):
    """One that no other library knows."""


class Checks(nn.Module):
    """Raises an error if its input is too long."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.inner, self.error = nn.Linear(WIDTH, WIDTH), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 32:
            raise self.error("at most 32 rows")
        return self.inner(x)  # type: ignore[no-any-return]


class Within(nn.Module):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.checks, self.last = Checks(error), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.checks(x).tanh()).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("error", [ValueError, KeyError, AssertionError, RuntimeError, OwnError])
@pytest.mark.parametrize("kind", [Checks, Within])
def test_an_error_of_the_model(kind: Callable[[type[Exception]], nn.Module], error: type[Exception]) -> None:
    net, long = kind(error), torch.randn(40, WIDTH)
    with pytest.raises(error, match="at most 32 rows"):
        memplan.plan(net, long, "1MiB", costs="estimate")
    with pytest.raises(error, match="at most 32 rows"):
        memplan.apply(net, long, "1MiB", costs="estimate")
    assert memplan.plan_of(net) is None
    memplan.apply(net, torch.randn(24, WIDTH), "1MiB", costs="estimate")
    with pytest.raises(error, match="at most 32 rows"):
        net(long)
    with pytest.raises(error, match="at most 32 rows"):
        memplan.prepare(net, [long])
    net(torch.randn(16, WIDTH)).sum().backward()


def test_an_error_of_pytorch() -> None:
    net = Within(ValueError)
    with pytest.raises(RuntimeError, match="shapes"):
        memplan.apply(net, torch.randn(8, 5), "1MiB", costs="estimate")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.randn(8, 5))


def test_an_error_of_a_loss_function() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise OwnError("no labels")

    with pytest.raises(OwnError, match="no labels"):
        memplan.apply(Within(ValueError), torch.randn(8, WIDTH), "1MiB", costs="estimate", loss_fn=loss)


def test_the_cause_of_an_error_stays() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return {}["scale"] * x  # type: ignore[no-any-return]
            except KeyError as error:
                raise ValueError("no scale") from error

    with pytest.raises(ValueError, match="no scale") as caught:
        memplan.apply(nn.Sequential(nn.Linear(4, 4), Reads()), torch.randn(2, 4), "1MiB", costs="estimate")
    assert isinstance(caught.value.__cause__, KeyError)
