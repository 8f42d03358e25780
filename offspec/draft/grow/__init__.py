"""Growing a token tree: best-first, or into a precomputed shape."""
