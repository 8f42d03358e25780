"""How well the link is used while a model streams."""
