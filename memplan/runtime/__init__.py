"""Carrying out a schedule. Enters: a plan and its capture. Leaves: outputs and gradients.

`program` lowers a schedule and runs it, `host` moves tensors, `parts` runs parts of a step, `ranks` lets ranks agree on
a step, `watch` measures. Start with `program.lower`.
"""
