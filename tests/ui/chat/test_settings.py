"""`/set` and `/seed`."""

from dataclasses import replace
from typing import Any

import pytest

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.settings import MEANINGS
from tests.ui.chat.talk import SETUP, finished, say, shown

PARAMS = SETUP.sampling.apply_to(SamplingParams())


def test_set_shows_all_parameters_or_one(chat: ChatController) -> None:
    text = shown(chat, "/set")
    assert SamplingParams.__dataclass_fields__.keys() >= MEANINGS.keys()
    for name in MEANINGS:  # token-id rules are for callers in Python
        assert f"| `{name}` |" in text
    assert shown(chat, "/set top-p").startswith("`top_p` is `1`: ")


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("temperature=0.7 top_p=0.9", {"temperature": 0.7, "top_p": 0.9}),
        ("temperature 0.7", {"temperature": 0.7}),
        ("Max-Tokens=1,000", {"max_tokens": 1000}),
        ("ignore_eos=on", {"ignore_eos": True}),
        ('stop="The end" stop="\\n\\n"', {"stop": ("The end", "\n\n")}),
        (r"stop=\n stop=a\tb", {"stop": ("\n", "a\tb")}),
        ("stop=### stop='say \"so\"'", {"stop": ("###", 'say "so"')}),
        ("bad_words=alas bad_words='oh my'", {"bad_words": ("alas", "oh my")}),
    ],
)
def test_set_changes_parameters(chat: ChatController, line: str, changes: dict[str, Any]) -> None:
    assert shown(chat, f"/set {line}").startswith("From the next answer on, ")
    assert chat.session.params == replace(PARAMS, **changes)
    assert shown(chat, f"/set {line}") == "No change: already set."
    name = next(iter(changes))
    shown(chat, f"/set {name}=default")
    assert getattr(chat.session.params, name) == getattr(PARAMS, name)
    shown(chat, "/set default")
    assert chat.session.params == PARAMS
    shown(chat, "/set stop=none seed=random")
    assert chat.session.params.stop == () and chat.session.params.seed is None


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("temperature=hot", "temperature must be a number, not 'hot'"),
        ("temperature=-1", "temperature must be 0 or above, not -1.0"),
        ("top_k=1.5", "top_k must be a whole number"),
        ("seed=-1", "seed must be between 0"),
        ("seed=x", "a whole number or random"),
        ("ignore_eos=maybe", "on or off"),
        ("temprature=1", "did you mean temperature\\?"),
        ("colour=red", "valid names are temperature, top_p"),
        ("temperature = 0.7", "without spaces around"),
        ("temperature=", "without spaces around"),
        ('stop="open', "a quote is not closed"),
    ],
)
def test_refused_set_changes_nothing(chat: ChatController, line: str, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        run_command(chat, f"/set {line}")
    with pytest.raises(RequestError):
        run_command(chat, f"/set min_p=0.5 {line}")
    assert chat.session.params == PARAMS


def test_seed(chat: ChatController) -> None:
    assert "A new seed is chosen" in shown(chat, "/seed")
    assert "The seed is 11" in shown(chat, "/seed 11")
    say(chat, "Why?")
    assert shown(chat, "/seed").startswith("The seed is 11; the last answer used 11.")
    finished(run_command(chat, "/retry").events)  # type: ignore[union-attr]
    assert "the last answer used 12" in shown(chat, "/seed")
    assert "new seed" in shown(chat, "/seed random")
    with pytest.raises(RequestError, match="between 0"):
        run_command(chat, "/seed -5")


def test_seed_omits_answers_without_a_seed(chat: ChatController) -> None:
    say(chat, "Why?")
    question, answer = chat.session.messages
    assert answer.figures is not None
    untold = replace(answer, figures=replace(answer.figures, seed=None))
    chat.session.conversation.change([question, untold])
    assert "the last answer" not in shown(chat, "/seed")


def test_help_lists_parameters(chat: ChatController) -> None:
    run_command(chat, "/set top_k=7")
    page = shown(chat, "/help set")
    assert all(f"| `{name}` |" in page for name in MEANINGS) and "`7`" in page
    assert "| `top_k`" not in shown(chat, "/help seed")
