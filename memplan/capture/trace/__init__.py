"""One eager step on fake tensors, recorded as aten ops in order: forward, then `torch.autograd.grad`.

Enters: a call and the tensors that forward reads. Leaves: a `RawTrace`. Start with `trace`.
"""
