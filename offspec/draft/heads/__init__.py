"""Small heads that draft from the target's hidden states: published checkpoints, opened and run."""
