"""Ways to run the units of a step that is planned in parts, and which one each takes. Start with `ways`."""
