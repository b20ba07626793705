"""Host memory: copies, where parameters live, and what optimizers need for those that live there.

Enters: tensors, and the names of those that move. Leaves: the same bits elsewhere. Start with `transfers`.
"""
