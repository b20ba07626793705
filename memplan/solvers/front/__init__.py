"""The best schedules known for every budget, and the methods that find them. Start with `front`."""
