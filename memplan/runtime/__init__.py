"""Carrying out a schedule: lowering to fx programs, running them under autograd, installing them in a model."""

from memplan.runtime.agreement import Agreement as Agreement
from memplan.runtime.agreement import Share as Share
from memplan.runtime.execute import TangentLayout as TangentLayout
from memplan.runtime.install import OnMismatch as OnMismatch
from memplan.runtime.install import OnOutOfMemory as OnOutOfMemory
from memplan.runtime.install import PlannedForward as PlannedForward
from memplan.runtime.install import planned_forward as planned_forward
from memplan.runtime.lower import Grads as Grads
from memplan.runtime.lower import Program as Program
from memplan.runtime.lower import lower as lower
from memplan.runtime.place import Init as Init
from memplan.runtime.place import materialise as materialise
from memplan.runtime.place import place as place
from memplan.runtime.rehearsal import errors_of_forward as errors_of_forward
from memplan.runtime.step import EagerStep as EagerStep
from memplan.runtime.step import Step as Step
from memplan.runtime.step import WholeStep as WholeStep
from memplan.runtime.transfers import Transfers as Transfers
from memplan.runtime.transfers import measure_link as measure_link
from memplan.runtime.unused import refuse_without_forward as refuse_without_forward
from memplan.runtime.updates import UpdatesInBackward as UpdatesInBackward
from memplan.runtime.updates import refuse_update_in_backward as refuse_update_in_backward
