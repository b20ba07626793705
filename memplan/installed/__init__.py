"""What stands in the place of a planned model's forward, and looks after its steps.

Enters: calls of the model. Leaves: what its forward would return. `planned_forward` is the shell on the module,
`choice` has the step for a call, `recovery` goes on where a step can't. Start with `planned_forward`.
"""
