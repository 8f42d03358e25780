"""Benches: each prints the ceiling first, then what was reached, then one line of JSON."""
