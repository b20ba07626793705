"""From a model and a sample to a traced step, and the key that says when it holds.

Enters: a model, its forward and a call. Leaves: a `Capture`: a `Traced` step (the plain graph, and how to run each op)
and its `Key`. Start with `capture`.
"""
