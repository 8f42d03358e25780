"""Trial of an architecture on token trees, and measurement of its cache size per position."""
