"""Prompts that keep the tokens of earlier turns: with made-up templates, a tokenizer, and real caches."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.chat.conversation import Conversation, Message
from offspec.chat.prompt_reuse import EncodedPrompt, PromptReuse
from offspec.chat.session import Session
from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.events import TextDelta
from tests.chat.talks import result_of, stop_at

END = "<|end|>"


class Letters:
    """Tokenizes by pairs of letters, unlike a text that was generated letter by letter."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.tokenized: list[str] = []

    def ids(self, words: Sequence[str]) -> tuple[int, ...]:
        self.words += [word for word in dict.fromkeys(words) if word not in self.words]
        return tuple(self.words.index(word) for word in words)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        said = "".join(f"<|{m['role']}|>{self.content(m, messages)}{END}" for m in messages)
        return said + "<|assistant|>"

    def content(self, message: Mapping[str, str], messages: Sequence[Mapping[str, str]]) -> str:
        return message["content"]

    def tokenize(self, text: str) -> list[int]:
        self.tokenized.append(text)
        return list(self.ids(re.findall(r"<\|\w+\|>|<\w+>|[^<][^<]|.", text, re.DOTALL)))

    def decode_with_special(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids)


class StripsSpaces(Letters):
    """A template that strips spaces."""

    def content(self, message: Mapping[str, str], messages: Sequence[Mapping[str, str]]) -> str:
        return message["content"].strip()


class OmitsReasoning(Letters):
    """A template that opens answers with reasoning, and omits earlier reasoning."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return super().render(messages) + "<think>\n"

    def content(self, message: Mapping[str, str], messages: Sequence[Mapping[str, str]]) -> str:
        return message["content"].split("</think>")[-1].lstrip("\n")


def asked(*messages: Message, **more: Any) -> Conversation:
    return Conversation(model="m", messages=list(messages), **more)


def question(text: str) -> Message:
    return Message("user", text)


def letterwise_answer(
    wording: Letters, text: str, *ending: str, content: str | None = None, opened: str = ""
) -> Message:
    """An answer generated letter by letter."""
    ids = wording.ids([*text, *ending])
    return Message("assistant", text if content is None else content, ids, "eos", opened=opened)


def prompts_around(wording: Letters, answer: Message) -> tuple[EncodedPrompt, EncodedPrompt]:
    """Return the prompt before an answer, and the next prompt."""
    transcript = PromptReuse(wording)
    first = transcript.encode(asked(question("Hello?")))
    return first, transcript.encode(asked(question("Hello?"), answer, question("Why?")))


@pytest.mark.parametrize("ending", [(END,), (), ("<|other|>",)])
def test_answers_keep_their_tokens(ending: tuple[str, ...]) -> None:
    """Whether it ended as in the template, was halted, or ended in another token."""
    wording = Letters()
    answer = letterwise_answer(wording, "Good day", *ending)
    first, second = prompts_around(wording, answer)
    kept = [*first.ids, *wording.ids("Good day"), *wording.ids([END])]
    assert second.ids[: len(kept)] == kept
    talk = asked(question("Hello?"), answer, question("Why?"))
    assert wording.decode_with_special(second.ids) == wording.render(talk.prompt())
    assert PromptReuse(wording).encode(talk) == second  # resumed


def test_text_stripped_by_the_template_is_tokenized_again() -> None:
    wording = StripsSpaces()
    transcript = PromptReuse(wording)
    talk = [question("Hello?")]
    first = transcript.encode(asked(*talk))
    talk += [letterwise_answer(wording, " Good day", END), question("Why?")]
    second = transcript.encode(asked(*talk))
    assert second.ids[: len(first.ids)] == first.ids
    assert wording.decode_with_special(second.ids) == wording.render(asked(*talk).prompt())
    talk += [letterwise_answer(wording, "So", END), question("I?")]
    kept = [*second.ids, *wording.ids(["S", "o", END])]
    assert transcript.encode(asked(*talk)).ids[: len(kept)] == kept


def test_reasoning_omitted_by_the_template() -> None:
    wording = OmitsReasoning()
    transcript = PromptReuse(wording)
    first = transcript.encode(asked(question("Hello?")))
    assert first.opened == "<think>\n"
    said = letterwise_answer(wording, "Hm.</think>\nGood day", END, opened=first.opened)
    second = transcript.encode(asked(question("Hello?"), said, question("Why?")))
    assert "Hm" not in wording.decode_with_special(second.ids) and "Good day" in wording.decode_with_special(
        second.ids
    )
    assert transcript.encode(asked(question("Hello?"))) == first  # undone: as asked at first


def test_halted_reasoning_continues_from_its_tokens() -> None:
    wording = OmitsReasoning()
    answer = letterwise_answer(wording, "Hm, what", opened="<think>\n")
    first, second = prompts_around(wording, answer)
    kept = [*first.ids, *(answer.token_ids or ())]
    assert second.ids[: len(kept)] == kept


def test_partial_character_keeps_its_tokens() -> None:
    wording = Letters()
    answer = Message("assistant", "a\ufffd", wording.ids(["a", "\ufffd"]), "length")
    first, second = prompts_around(wording, answer)
    assert second.ids[: len(first.ids) + 2] == [*first.ids, *(answer.token_ids or ())]


@pytest.mark.parametrize("ids", [(10**9,), (0, 0, 0), (-1,), ()])
def test_tokens_of_another_model_are_ignored(ids: tuple[int, ...]) -> None:
    wording = Letters()
    text = wording.decode_with_special(
        prompts_around(wording, Message("assistant", "Good day", ids, "eos"))[1].ids
    )
    assert text.count("Good day") == 1 and text.startswith("<|user|>Hello?")


def test_answer_edited_in_the_file_is_tokenized_again() -> None:
    wording = Letters()
    answer = letterwise_answer(wording, "Good day", END, content="Good night")
    text = wording.decode_with_special(prompts_around(wording, answer)[1].ids)
    assert "Good night" in text and "Good day" not in text


def test_new_system_text_changes_the_beginning() -> None:
    wording = Letters()
    transcript = PromptReuse(wording)
    talk = [question("Hello?"), letterwise_answer(wording, "Good day", END), question("Why?")]
    plain = transcript.encode(asked(*talk))
    kind = asked(*talk, system="Be kind.")
    assert transcript.encode(kind) == PromptReuse(wording).encode(kind)
    assert wording.decode_with_special(transcript.encode(kind).ids) == wording.render(kind.prompt())
    assert transcript.encode(asked(*talk)) == plain


def test_template_error_leaves_the_transcript_intact() -> None:
    class Strict(Letters):
        def render(self, messages: Sequence[Mapping[str, str]]) -> str:
            if "bad" in messages[-1]["content"]:
                raise RequestError("the model's chat template refuses the prompt")
            return super().render(messages)

    wording = Strict()
    transcript = PromptReuse(wording)
    first = transcript.encode(asked(question("Hello?")))
    answer = letterwise_answer(wording, "Good day", END)
    with pytest.raises(RequestError):
        transcript.encode(asked(question("Hello?"), answer, question("bad")))
    fresh = PromptReuse(wording).encode(asked(question("Hello?"), answer, question("fine")))
    assert transcript.encode(asked(question("Hello?"), answer, question("fine"))) == fresh
    assert transcript.encode(asked(question("Hello?"))) == first


words = st.text("ab <>\n", max_size=6)
turns = st.lists(st.tuples(words, words, st.booleans()), max_size=6)


@given(
    turns, st.sampled_from([Letters, StripsSpaces, OmitsReasoning]), st.lists(st.integers(0, 6), max_size=4)
)
def test_ids_always_spell_the_rendered_template(
    said: list[tuple[str, str, bool]], kind: type[Letters], cuts: list[int]
) -> None:
    """Also after switching between versions."""
    wording = kind()
    messages = [
        message
        for ask, answer, ended in said
        for message in (question(ask), letterwise_answer(wording, answer, *([END] if ended else [])))
    ]
    transcript = PromptReuse(wording)
    for cut in [*cuts, 6]:
        conversation = asked(*messages[: 2 * cut], question("End?"))
        assert wording.decode_with_special(transcript.encode(conversation).ids) == wording.render(
            conversation.prompt()
        )


# With a real tokenizer and a real engine.


@pytest.mark.exhaustive
def test_with_a_real_tokenizer(smollm2: Any) -> None:
    """An answer in tokens that its text would not be split into, and a partial character."""
    text = "Unbelievable naïveté, 🦊 and 日本語.\n\n```python\nprint(1)\n```"
    ids = [i for letter in text for i in smollm2.tokenize(letter)]
    assert ids != smollm2.tokenize(text) and smollm2.decode_with_special(ids) == text
    for end in ([], [smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>")]):
        transcript = PromptReuse(smollm2)
        first = transcript.encode(asked(question("Hello?"), system="Be kind."))
        answer = Message("assistant", text, (*ids, *end), "eos")
        talk = asked(question("Hello?"), answer, question("Why?"), system="Be kind.")
        second, kept = transcript.encode(talk), [*first.ids, *ids, *end]
        assert second.ids[: len(kept)] == kept
        assert smollm2.decode_with_special(second.ids) == smollm2.render(talk.prompt())
    # If the tokens are the usual ones, the ids are those of the whole text.
    plain = Message("assistant", "Good day.", tuple(smollm2.tokenize("Good day.<|im_end|>")), "eos")
    talk = asked(question("Hello?"), plain, question("Why?"))
    assert PromptReuse(smollm2).encode(talk).ids == smollm2.tokenize(smollm2.render(talk.prompt()))


class Words:
    """The tiny tokenizer with a template that writes the messages as they are."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"{m['content']} {'w11 ' if m['role'] == 'user' else ''}" for m in messages)

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._engine.encode(text, raw=True)
        return ids

    def decode_with_special(self, ids: Sequence[int]) -> str:
        return "".join(f"w{i} " for i in ids if i > 2)  # hidden tokens are not part of the text


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tests.support.tiny_models import write_model

    return write_model(tmp_path / "model")


@pytest.fixture
def engine(model: Path) -> Iterator[Any]:
    from tests.support.tiny_models import tiny_engine

    with tiny_engine(model) as engine:
        yield engine


def test_caches_keep_generated_tokens(engine: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.tiny_models import tiny_engine

    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)
    session = Session(engine, Words(engine), Conversation(model="m", params=params))
    stream = engine.stream
    prompts: list[list[int]] = []

    def listen(ids: list[int], *args: Any, **more: Any) -> Any:
        prompts.append(ids)
        return stream(ids, *args, **more)

    monkeypatch.setattr(engine, "stream", listen)
    results = [result_of(session.send(text)) for text in ("w20 w21", "w30", "w31 w32 w33")]
    for turn in (1, 2):
        whole = [*prompts[turn - 1], *results[turn - 1].token_ids]
        assert prompts[turn][: len(whole)] == whole
        # The answer's last token was chosen but not run through the target yet; it is the first of the next
        # pass.
        assert results[turn].reused_tokens == len(whole) - 1
        with tiny_engine(model) as fresh:
            alone = fresh.generate(prompts[turn], params)
        assert alone.token_ids == results[turn].token_ids
    session.rewind(2)
    again = result_of(session.send("w30"))
    assert again.token_ids == results[1].token_ids and again.reused_tokens == len(prompts[1]) - 1
    list(session.retry())
    assert session.messages[-1].token_ids != again.token_ids, "else this shows nothing"
    session.switch(0)
    after = result_of(session.send("w31 w32 w33"))  # as if there were no other version
    assert prompts[-1] == prompts[2] and after.token_ids == results[2].token_ids

    session.params = replace(session.params, max_tokens=200)
    halted = result_of(stop_at(session, session.send("w20 w21"), TextDelta))
    assert halted.finish_reason == "halted" and 0 < halted.tokens < 200
    second = result_of(session.send("w30", params=SamplingParams(max_tokens=4)))
    assert second.reused_tokens == halted.prompt_tokens + halted.tokens - 1
