"""memplan under DeepSpeed's engines."""
