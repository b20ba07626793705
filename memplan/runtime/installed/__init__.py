"""What stands in the place of a planned model's forward, and looks after it.

Enters: calls of the model. Leaves: what its forward would return. Start with `install`.
"""
