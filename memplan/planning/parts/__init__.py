"""Steps that can't be captured whole: parts of them, or blocks that the user names, are planned, the rest is not.

Enters: a `PartsRequest`. Leaves: a plan and how each part runs. The one door is `plan_parts`, and reads as its stages:
`capture_parts` finds and captures, `solve_parts` has schedules of each, `measure_parts` says what each would hold,
`fit_parts` chooses. Start with `plan_parts`.
"""
