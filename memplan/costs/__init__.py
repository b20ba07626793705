"""Seconds and bytes of what a step runs: ops, libraries, the optimizer, and how far off predictions were.

Enters: a `Traced` step, an optimizer. Leaves: the `Costs` of a problem. Start with `measure`.
"""
