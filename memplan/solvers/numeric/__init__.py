"""How kernels are compiled, run side by side, and draw numbers. Each file stands by itself."""
