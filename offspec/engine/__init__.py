"""One request at a time: a prompt becomes passes over a loaded target, and these become events.

Loaded models and requests come in; tokens, text and statistics go out. Nothing here knows a terminal.
"""
