"""From a raw trace to values and ops: which tensors share memory, what may run again, what is a gradient.

Enters: a `RawTrace`. Leaves: a `Traced` step. Start with `values`.
"""
