"""Local search on orders of ops. Start with `refine`."""
