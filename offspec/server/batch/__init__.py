"""Batches: requests in a file, whose results are written to another file."""
