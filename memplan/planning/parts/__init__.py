"""Steps that can't be captured whole: parts of them, or blocks that the user names, are planned, the rest is not.

Enters: a model and a call, or blocks of a model. Leaves: a step of which parts are planned. Start with `partial`.
"""
