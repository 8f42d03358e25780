"""Many requests from a file, answered into another: `offspec batch`."""
