"""A plan: a problem, the schedule chosen for it, and what `simulate` says of that schedule. No torch.

Enters: a `Problem` and a `Schedule`. Leaves: figures, files, a page of text, one of pictures, a networkx graph. Start
with `plan`; what a step holds when, and as what, is in `step_memory`, why tensors are kept in `choices`.
"""
