"""Least recomputation of a block, with a certificate: branch and bound. Start with `exact`."""
