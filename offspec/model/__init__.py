"""A transformers model that owns no weights, and what it needs to run over a token tree."""
