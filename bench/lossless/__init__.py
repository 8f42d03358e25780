"""Whether any setting changes a token."""
