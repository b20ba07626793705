"""From a call to a plan, and to a step that can run.

Enters: a model, a call and the user's settings. Leaves: a step of `runtime.program.step`. Start with `planner`.
"""
