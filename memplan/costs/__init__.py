"""Seconds and bytes of what a step runs: ops, libraries, the optimizer, and how far predictions were off.

Enters: a `Traced` step, an optimizer. Leaves: the `Costs` of a problem. Start with `measure`.
"""
