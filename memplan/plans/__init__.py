"""A plan: a problem, the schedule chosen for it, and what `simulate` says of that schedule. No torch.

Enters: a `Problem` and a `Schedule`. Leaves: figures, files, a page of text, a networkx graph. Start with `plan`.
"""
