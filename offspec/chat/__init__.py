"""Conversations: messages, sessions that generate answers, and session files.

Inputs are questions; outputs are events and saved conversations. Nothing here computes with tensors or draws
on a screen.
"""
