"""The kernels beside what the device can do, and how exact they are."""
