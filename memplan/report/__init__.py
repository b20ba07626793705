"""Plans told to people. Plain data only."""
