"""Chains of blocks: the partition, the options of each block, Rotor's recurrence, and hierarchies of chains.

Enters: a flat problem. Leaves: orders of ops, one for each budget. Start with `partition`, then `rotor`.
"""
