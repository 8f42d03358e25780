"""Errors in a caller's arguments."""


class ArgumentError(ValueError):
    """Wrong shape, strides, dtype or device of an argument; `argument` is its name."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument


class PathError(RuntimeError):
    """The requested backend cannot run here; the message names what is missing."""
