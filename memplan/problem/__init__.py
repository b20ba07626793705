"""Plain data, and the accountant. No torch.

Enters: nothing of memplan but errors, units and `jit`. Leaves: a `Problem` (`data`: values, ops, costs, a budget), a
`Schedule` for it (`schedule`), and what that holds and takes (`simulate`, the only accountant). Start with `data`, then
`simulate`.
"""
