"""Several draft sources in one tree: mixture weights, and pausing sources that do not pay."""
