"""Text from outside, made safe to show."""

# A model may write any character; on a terminal the control characters would act, and those that turn the
# direction of text would show it in another order than it has. Tab and newline may.
_DIRECTIONS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), *_DIRECTIONS], "�")


def printable(text: str) -> str:
    """The text with a sign in place of every character that a terminal would obey."""
    return text.translate(_CONTROLS)
