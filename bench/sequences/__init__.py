"""Many answers from one trip of the weights."""
