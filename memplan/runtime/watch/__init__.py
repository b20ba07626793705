"""What a step really held and took. Enters: a step that runs. Leaves: bytes and seconds. Start with `meter`."""
