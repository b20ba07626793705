"""Steps that can't be captured whole: parts of them are planned; the rest is not.

Enters: a `PartsRequest`. Leaves: a plan and how each part runs. The one function to call is `plan_parts`. Its stages:
`capture_parts` finds and captures the parts, `solve_parts` finds schedules of each, `measure_parts` says what each
schedule would hold in the step, `fit_parts` chooses one for each. Start with `plan_parts`.
"""
