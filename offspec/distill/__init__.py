"""Heads trained on a target's own text, and written as they are published."""
