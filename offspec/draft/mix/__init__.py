"""Several draft sources in one tree: their weights, and resting those that do not pay."""
