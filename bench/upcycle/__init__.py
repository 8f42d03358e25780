"""Experts by need, on an upcycled model."""
