"""Where guesses come from."""
