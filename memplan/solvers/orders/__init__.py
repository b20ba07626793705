"""Orders of ops as arrays: a fast accountant for them, rewritings, sketches. Start with `flat`, then `replay`."""
