"""Inference engine: runs requests on a loaded target and yields tokens, text and statistics as events.

Requests may share passes (continuous batching). The package is independent of any user interface.
"""
