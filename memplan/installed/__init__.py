"""What stands in the place of a planned model's forward, and looks after its steps.

Enters: calls of the model. Leaves: what its forward would return. `planned_forward` replaces the forward, `choice`
finds the step for a call, `recovery` goes on where a step can't. Start with `planned_forward`.
"""
