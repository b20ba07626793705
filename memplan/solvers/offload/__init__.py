"""Copies to host memory, and gathers, added to an order of ops. Start with `fit_copies`."""
