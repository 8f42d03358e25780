"""Evaluation of a GPU in minutes: whether offspec runs, whether it is exact, how fast each part is."""
