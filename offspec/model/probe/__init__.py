"""Whether an architecture runs over token trees, and what it keeps of a token: tried, not looked up."""
