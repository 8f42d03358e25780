"""A conversation: messages, the session that asks for answers, and the files that keep both.

Questions come in, events and saved conversations go out. Nothing here computes with tensors or draws on a
screen.
"""
