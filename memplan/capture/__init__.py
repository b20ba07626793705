"""From a model and a sample to a traced step, and the key that says which calls it serves.

Enters: a model, its forward and a call. Leaves: a `Capture`: a `Traced` step (the plain graph, and how to run each op)
and its key. Start with `capture`.
"""
