"""From a schedule to two fx programs, and running them under autograd.

Enters: a schedule and a `Traced` step. Leaves: outputs and gradients. Start with `lower`, then `execute`.
"""
