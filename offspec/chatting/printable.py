"""Text from outside, made safe to show."""

# A model may write any character; on a terminal the control characters would act. Tab and newline may.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "�")


def printable(text: str) -> str:
    """The text with a sign in place of every character that a terminal would obey."""
    return text.translate(_CONTROLS)
