"""Tokens and text, both ways: `codec` prompts in, `stream` characters out."""
