"""What is known of single ops and tensors: layouts, what results depend on, what real kernels give.

Enters: nodes of a trace and tensors. Leaves: facts about them. Each file stands by itself.
"""
