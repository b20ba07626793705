"""Lower bounds on seconds within a budget, for every schedule. Start with `lower_bound`."""
