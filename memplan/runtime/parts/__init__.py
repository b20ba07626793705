"""Parts of a step: how each runs, and rehearsals that measure a step which runs in parts.

Enters: a model, a call and its parts. Leaves: what the step holds, and parts that run planned. Start with
`partial_step`.
"""
