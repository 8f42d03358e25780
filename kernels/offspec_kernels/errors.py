"""What a caller did wrong, said with the name of the argument."""


class ArgumentError(ValueError):
    """An argument has the wrong shape, strides, dtype or device. `argument` is its name."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument


class PathError(RuntimeError):
    """A path that was asked for cannot run here; the message says what it lacks."""
