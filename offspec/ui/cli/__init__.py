"""The command line: parses options, passes them to the engine, and renders its events."""
