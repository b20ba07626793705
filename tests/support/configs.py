"""Configurations whose figures, which users do not turn, are others than usual."""

from __future__ import annotations

import dataclasses

from memplan.config import Config


def with_figures(config: Config | None = None, **figures: int) -> Config:
    """The configuration with these fields of its `SearchFigures` changed."""
    config = config or Config()
    return dataclasses.replace(config, _figures=dataclasses.replace(config.figures, **figures))
