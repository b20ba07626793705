"""From a raw trace to values and ops: who shares memory with whom, what may run again, what a gradient is.

Enters: a `RawTrace`. Leaves: a `Traced` step. Start with `values`.
"""
