"""Plans for plain DAGs, without a forward and a backward pass. Start with `solve_dag`."""
