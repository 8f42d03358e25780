"""Estimated time of additional prompt tokens."""

from offspec.engine.prefix_cache import PrefillRate


def test_rows_cost_what_they_add_to_a_pass() -> None:
    rate = PrefillRate()
    assert rate.seconds(100) is None, "nothing was seen yet"
    rate.note(1, 2.0)
    assert rate.seconds(100) is None, "a pass with only a tree gives no estimate for prompts"
    rate.note(1000, 7.0)
    assert rate.seconds(100) == 0.5
    rate.note(2, 3.0)
    assert rate.seconds(100) == 0.5, "a pass that was held up"
    rate.note(500, 1.5)
    assert rate.seconds(100) == 0.0, "rows that are computed during weight transfers cost nothing"


def test_without_a_short_pass_all_is_the_prompt() -> None:
    rate = PrefillRate()
    rate.note(1000, 8.0)
    assert rate.seconds(500) == 4.0
