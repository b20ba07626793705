"""How kernels are compiled, run side by side, draw numbers and find minimum cuts."""
