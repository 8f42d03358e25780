"""Seconds from a long prompt to its first token."""
