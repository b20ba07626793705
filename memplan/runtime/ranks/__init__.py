"""Ranks that train one model together agree on what each of them runs. Start with `agreement`."""
