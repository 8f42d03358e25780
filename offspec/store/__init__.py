"""Tiers: memory that weights are read into, and the files they are read from."""
