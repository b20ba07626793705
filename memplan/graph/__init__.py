"""From a model and a sample to plain data: capture, alias analysis, costs."""

from memplan.graph.capture import Capture as Capture
from memplan.graph.capture import capture as capture
from memplan.graph.costs import estimate as estimate
from memplan.graph.costs import measure as measure
from memplan.graph.traced import Traced as Traced
from memplan.graph.view import to_networkx as to_networkx
