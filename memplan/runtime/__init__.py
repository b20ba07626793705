"""Carrying out a schedule: lowering to fx programs, running them under autograd, installing them in a model."""

from memplan.runtime.install import PlannedForward as PlannedForward
from memplan.runtime.install import planned_forward as planned_forward
from memplan.runtime.lower import Program as Program
from memplan.runtime.lower import lower as lower
