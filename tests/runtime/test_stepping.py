"""What optimizers are made to heed where parameters live on the host ends with the last such model."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import _MultiDeviceReplicator

from memplan.runtime.host import place as stepping


def test_scalers_wait_once_a_model_has_parameters_on_the_host() -> None:
    stepping.step_on_both_sides(nn.Linear(2, 2))
    waiting = _MultiDeviceReplicator.get
    assert waiting.__module__.startswith("memplan.")
    stepping.step_on_both_sides(nn.Linear(2, 2))
    assert _MultiDeviceReplicator.get is waiting


def test_optimizers_find_state_where_parameters_are_as_long_as_there_is_such_a_model() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    away = torch.zeros(2, 2, device="meta")

    def step() -> torch.Tensor:
        optimizer.state[other.weight] = {"momentum_buffer": away}
        stepping._state_where_parameters_are(optimizer, (), {})
        found: torch.Tensor = optimizer.state[other.weight]["momentum_buffer"]
        return found

    assert step() is away
    stepping.step_on_both_sides(model)
    with pytest.raises(NotImplementedError, match="meta"):  # from where nothing can be copied, so it was tried
        step()
    del model
    gc.collect()
    assert step() is away
