"""Fuses a captured step: groups of pointwise ops and reductions become ops of their own, compiled by Inductor.

Enters: a `Traced` step. Leaves: a `Traced` step with fewer ops, whose bits do not depend on budget or schedule. Start
with `fuse_step`, which reads as its stages, has backward make again what is cheap, and compiles each distinct group:

- `step_graph` says which ops can be fused, and writes the step as one functional graph.
- `groups` joins what can run together, and has results written over what is read for the last time (`donate`).
- `group_program` is a group as plain data, with what is known of it on disk; `workers` are the processes that compile.
"""
