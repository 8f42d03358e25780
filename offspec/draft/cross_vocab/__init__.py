"""Drafting with a model whose tokenizer is not the target's."""
