"""A CUDA device in software, for tests of what a GPU would do with the project's code."""
