"""Runs of a model on the sample, before there is a plan. Nothing of them stays.

Enters: a model and a call. Leaves: what forward reads and leaves behind (`one_forward`), what calls in it are like that
can't be traced (`island_runs`), or what the step as it is holds (`unplanned_peak`, with `nothing_kept`).
"""
