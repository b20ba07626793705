"""The commands of `memplan` and `python -m memplan`. Start with `commands.main`.

Each command has a file, and gives an `Outcome`. Torch is imported where a command needs it, so that others are quick.
"""
