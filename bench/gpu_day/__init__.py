"""A first look at a GPU, in minutes: whether it runs, whether it is exact, how fast each part is."""
