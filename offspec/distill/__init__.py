"""Draft heads trained on a target's own text, and written in their published formats."""
