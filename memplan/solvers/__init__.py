"""Solvers: from a problem to schedules and bounds. Plain data in, plain data out; no torch anywhere in here.

Start with `front.front`: `solve_front` has the best schedules for every budget, by the methods in `front.methods`.
"""

from memplan.solvers.bounds.lower_bound import Bound as Bound
from memplan.solvers.front.front import Candidate as Candidate
from memplan.solvers.front.front import Front as Front
from memplan.solvers.front.front import Progress as Progress
from memplan.solvers.front.front import candidate as candidate
from memplan.solvers.front.front import front_of_orders as front_of_orders
from memplan.solvers.front.front import solve_front as solve_front
from memplan.solvers.front.front import textbook as textbook
