"""How kernels are compiled, and how they find minimum cuts."""
