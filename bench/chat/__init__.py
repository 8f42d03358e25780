"""Delays and costs of the chat's terminal interface."""
