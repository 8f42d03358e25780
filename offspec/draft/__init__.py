"""Sources of draft tokens."""
