"""What forward reads and sets outside of its arguments: Python attributes, and memory that is written in place.

Enters: a model. Leaves: what its attributes were, and a way to put them back. Start with `tables`.
"""
