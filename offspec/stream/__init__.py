"""Weight streaming: ring buffers that are filled from disk and copied to a device during computation."""
