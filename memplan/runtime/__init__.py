"""Carrying out a schedule. Enters: a plan and its capture. Leaves: outputs and gradients.

`program` lowers a schedule and runs it, `host` moves tensors, `trial` runs the model on the sample, `ranks` lets ranks
agree on a step, `watch` measures. Start with `program.lower`.
"""
