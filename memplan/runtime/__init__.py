"""Carrying out a schedule. Enters: a plan and its capture. Leaves: a model whose forward runs it.

`program` lowers a schedule and runs it, `host` moves tensors, `parts` runs parts of a step, `installed` stands in the
place of a model's forward, `ranks` has ranks agree, `watch` measures. Start with `program.lower`.
"""
