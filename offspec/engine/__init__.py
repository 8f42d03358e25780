"""Requests over a loaded target: prompts become passes, which requests may share, and passes become events.

Loaded models and requests come in; tokens, text and statistics go out. Nothing here knows a terminal.
"""
