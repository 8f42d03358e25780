"""Check that no setting changes a token."""
