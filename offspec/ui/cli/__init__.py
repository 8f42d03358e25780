"""The command line: parse options, hand them to the engine, render its events. Nothing else."""
