"""Detokenization: text is emitted only when complete, none is lost, and all stop strings are found."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offspec.core.errors import CheckpointError, ModelNotFoundError, RequestError
from offspec.engine.detokenizer import IncrementalDetokenizer, StopStrings, TextStream
from offspec.model.tokenizer import TextCodec, load_tokenizer
from offspec.model.vocabulary import same_vocabulary
from tests.support.tokenizers import byte_fallback, byte_level, pieces, saved

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no\ntools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

quick = settings(max_examples=40, deadline=None)
texts = st.lists(st.sampled_from(pieces) | st.characters(codec="utf-8"), max_size=40).map("".join)


def opened(tokenizer: tokenizers.Tokenizer, folder: Path, **settings: Any) -> TextCodec:
    return TextCodec(load_tokenizer(saved(tokenizer, folder, **settings)), folder, {})


@pytest.fixture(scope="session")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    return {
        "byte-level": opened(byte_level(), tmp_path_factory.mktemp("level"), chat_template=TEMPLATE),
        "byte-fallback": opened(byte_fallback(), tmp_path_factory.mktemp("fallback")),
    }


def encode(codec: TextCodec, text: str) -> list[int]:
    ids: list[int] = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def chunks(items: Any, cuts: Iterable[int]) -> list[Any]:
    """Return the pieces of a sequence between sorted cuts, including empty pieces."""
    ends = [min(cut, len(items)) for cut in sorted(cuts)]
    return [items[a:b] for a, b in zip([0, *ends], [*ends, len(items)], strict=True)]


def streamed(codec: TextCodec, pushes: Iterable[list[int]]) -> str:
    """Return the pieces of all pushes; check each prefix against the whole text."""
    stream, text = IncrementalDetokenizer(codec), ""
    pieces = [stream.push(ids) for ids in pushes]
    pieces.append(stream.finish())
    text = "".join(pieces)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    return text


def by_token(codec: TextCodec, ids: list[int]) -> str:
    return streamed(codec, [[token] for token in ids])


cut_lists = st.lists(st.integers(0, 30), max_size=6)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@quick
@given(text=texts, cuts=cut_lists)
def test_any_text_comes_back_in_pieces(
    codecs: dict[str, TextCodec], name: str, text: str, cuts: list[int]
) -> None:
    codec = codecs[name]
    ids = encode(codec, text)
    whole = codec.decode(ids)
    assert whole == (text if name == "byte-level" else text.replace("▁", " "))
    assert streamed(codec, chunks(ids, cuts)) == by_token(codec, ids) == whole


def test_a_text_comes_back_from_a_real_tokenizer(smollm2: TextCodec) -> None:
    ids = encode(smollm2, "".join(pieces) * 2)
    assert by_token(smollm2, ids) == smollm2.decode(ids)


@pytest.mark.parametrize(("name", "size"), [("byte-level", 330), ("byte-fallback", 278)])
@quick
@given(data=st.data())
def test_any_tokens_come_back_even_if_they_are_no_text(
    codecs: dict[str, TextCodec], name: str, size: int, data: st.DataObject
) -> None:
    codec, ids = codecs[name], data.draw(st.lists(st.integers(0, size - 1), max_size=100))
    assert by_token(codec, ids) == codec.decode(ids)


# Runs longer than the window in which no character ends, and whole ones among them.
garbage = st.lists(
    st.tuples(st.sampled_from([b"\xf0\x9f\x8e", b"\xe6\x97", b"\xff", "🎉".encode()]), st.integers(1, 40)),
    max_size=6,
).map(lambda runs: b"".join(count * run for run, count in runs))


@quick
@given(text=st.binary(max_size=100) | garbage)
def test_bytes_that_are_no_text(codecs: dict[str, TextCodec], text: bytes) -> None:
    """Complete characters around broken ones are kept, as in Python; transformers drops a run of bytes."""
    codec = codecs["byte-fallback"]
    vocabulary = codec.tokenizer.get_vocab()
    ids = [vocabulary["<0x41>"], *(vocabulary[f"<0x{byte:02X}>"] for byte in text)]
    expected = f"A{text.decode('utf-8', 'replace')}"
    assert codec.decode(ids) == codec.decode_with_special(ids) == by_token(codec, ids) == expected
    with suppress(UnicodeDecodeError):
        text.decode()
        assert codec.tokenizer.decode(ids) == expected


def test_a_vocabulary_that_only_spells_bytes(tmp_path: Path) -> None:
    """Tokens named like bytes, in a vocabulary that decodes them literally."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel(
            {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}, unk_token="<unk>"
        )
    )
    codec = opened(tokenizer, tmp_path)
    assert codec.decode([256, 66]) == codec.tokenizer.decode([256, 66]) == "<0xFF> <0x41>"


def test_a_character_waits_for_its_last_byte(codecs: dict[str, TextCodec]) -> None:
    for codec in codecs.values():
        text = "the éx𝄞 cat"
        stream, shown = IncrementalDetokenizer(codec), ""
        for i in encode(codec, text):
            shown += stream.push([i])
            assert text.startswith(shown)
        assert shown == text and stream.finish() == ""
        half = IncrementalDetokenizer(codec)
        assert half.push(encode(codec, "the éx𝄞")[:-1]) == "the éx"
        assert set(half.finish()) == {"\ufffd"}


def test_characters_are_shown_though_every_token_ends_inside_one(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte-level"]
    vocabulary = codec.tokenizer.get_vocab()
    # A token that ends one 日 and begins the next, which the vocabulary does not have; so by hand.
    tokenizer = byte_level()
    one = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("日")[0][0]
    assert len(one) == 3
    tokenizer.add_tokens([one[2] + one[:2]])
    straddling = tokenizer.token_to_id(one[2] + one[:2])
    assert straddling is not None
    other = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer), codec.folder, {})
    stream = IncrementalDetokenizer(other)
    shown = stream.push([vocabulary[one[0]], vocabulary[one[1]]])
    for count in range(200):
        assert shown == "日" * count
        shown += stream.push([straddling])
    assert stream.finish() == "\ufffd"


def test_spaces_are_not_tidied_up(tmp_path: Path) -> None:
    """Many tokenizers enable the cleanup of spaces, which would retract emitted text."""
    insist = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    codec = opened(byte_level(), tmp_path, clean_up_tokenization_spaces=True, **{insist: True})
    ids = encode(codec, "the cat . do n't")
    assert by_token(codec, ids) == codec.decode(ids) == "the cat . do n't"


def test_special_tokens_leave_no_trace(codecs: dict[str, TextCodec]) -> None:
    for codec in codecs.values():
        bos, eos = codec.tokenizer.bos_token_id, codec.tokenizer.eos_token_id
        ids = encode(codec, "the cat")
        mixed = [bos, *(x for i in ids for x in (i, eos)), eos]
        assert codec.decode(mixed) == by_token(codec, mixed) == "the cat"


@pytest.mark.parametrize(("kind", "most"), [("text", 16), ("broken", 65)])
def test_the_cost_of_a_token_does_not_grow(
    codecs: dict[str, TextCodec], kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, lengths, text = codecs["byte-fallback"], list[int](), "the cat 日本🎉 " * 100
    plain, broken = codec.decode, [codec.tokenizer.get_vocab()["<0xFF>"]] * 500

    def counted(ids: Iterable[int]) -> str:
        lengths.append(len(window := list(ids)))
        return plain(window)

    monkeypatch.setattr(codec, "decode", counted)
    if kind == "text":
        assert streamed(codec, [encode(codec, text)]) == text
    else:
        assert streamed(codec, [broken]) == "\ufffd" * 500
    assert max(lengths) <= most


# Stop strings.

stops_and_text = st.tuples(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.text("abc", max_size=30)
)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Return the position where stop strings cut the text, by testing every prefix."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@settings(max_examples=100, deadline=None)
@given(stops_and_text, cut_lists)
def test_stop_strings_do_not_depend_on_the_pieces(case: tuple[list[str], str], cuts: list[int]) -> None:
    stops, text = case
    finder, shown, stopped = StopStrings(stops), "", False
    for piece in chunks(text, cuts):
        ready, stopped = finder.push(piece)
        shown += ready
        assert not any(stop in shown for stop in stops)
    shown += finder.finish()
    cut = first_stop(text, stops)
    assert stopped == finder.stopped == (cut is not None)
    assert shown == text[:cut]
    if len(stops) == 1:
        assert (text.find(stops[0]) if stopped else None) == cut


def test_a_stop_string_longer_than_any_answer_costs_no_time() -> None:
    """A million comparisons of 500 kB per token would take hours."""
    stops = StopStrings(["x" * 10**6])
    assert [stops.push(piece)[0] for piece in ("a", "xx", "xa", "x")] == ["a", "", "xxxa", ""]
    assert stops.finish() == "x"


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["END", "\n\n"])
    assert finder.push("the E") == ("the ", False)
    assert finder.push("N") == ("", False)
    assert finder.push("T\n") == ("ENT", False)
    assert finder.push("x") == ("\nx", False)
    assert finder.push("aEND more") == ("a", True)
    assert finder.push("ignored") == ("", True)
    assert finder.finish() == ""


@quick
@given(text=st.text("the ca🎉", max_size=20), stop=st.text("the ca🎉", min_size=1, max_size=3))
def test_a_stream_stops_at_the_token_that_completes_the_stop(
    codecs: dict[str, TextCodec], text: str, stop: str
) -> None:
    for codec in codecs.values():
        ids = encode(codec, text)
        stream, shown, kept = TextStream(codec, [stop]), "", 0
        for kept, token in enumerate(ids, 1):  # noqa: B007
            if stream.push(token):
                break
            shown += "".join(stream.take())
        shown += "".join(stream.finish())
        assert stream.stopped == (stop in text)
        assert shown == text.split(stop)[0]
        if stream.stopped:
            assert stop in codec.decode(ids[:kept]) and stop not in codec.decode(ids[: kept - 1])
        assert stream.finish() == [""] and stream.take() == []


def test_a_stream_emits_each_character_once_and_the_chosen_special_tokens(
    codecs: dict[str, TextCodec],
) -> None:
    stream = TextStream(codecs["byte-level"])
    for token in encode(codecs["byte-level"], "the cat"):
        assert not stream.push(token)
    assert (stream.take(), stream.take(), stream.finish()) == (["the ", "c", "at"], [], [""])
    for codec in codecs.values():
        bos, eos = (codec.tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "</s>"))
        ids = [bos, *encode(codec, "the cat"), eos, bos]
        stream = TextStream(codec, shown={bos})
        for each in ids:
            stream.push(each)
        assert "".join(stream.finish()) == "<s>" + codec.decode(ids) + "<s>"


# Prompts.


def test_prompts_use_the_template_or_none(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte-level"]
    bos = codec.tokenizer.bos_token_id
    assert codec.has_chat_template and not codecs["byte-fallback"].has_chat_template
    assert codec.encode_prompt("the cat") == [bos, *encode(codec, "[user]the cat[assistant]")]
    turns = [{"role": "system", "content": ""}, {"role": "user", "content": "sat"}]
    assert codec.encode_prompt(turns) == [bos, *encode(codec, "[system][user]sat[assistant]")]
    assert codec.encode_prompt("the cat", raw=True) == encode(codec, "the cat")
    assert codec.encode_prompt(" ", raw=True)
    with pytest.raises(RequestError, match="`raw=True`"):
        codecs["byte-fallback"].encode_prompt("the cat")


def test_a_raw_prompt_has_the_tokens_that_the_tokenizer_adds(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    codec = opened(tokenizer, tmp_path, chat_template=TEMPLATE)
    assert codec.encode_prompt("the cat", raw=True)[0] == 0
    assert codec.encode_prompt("the cat").count(0) == 1  # the template wrote one already


PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}<image>{% endif %} {% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [PARTS, PARTS.replace("{% else %}", "{% else %}{{ p.nothing.at_all }}")])
def test_templates_that_look_for_parts_are_given_them(template: str, tmp_path: Path) -> None:
    """Such a template treats a string as a list of characters, without text parts."""
    codec = opened(byte_level(), tmp_path, chat_template=template)
    assert codec.render([{"role": "user", "content": "the cat"}]).strip() == "the cat"


def test_the_real_template_is_that_of_transformers(smollm2: TextCodec) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    expected = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm2.encode_prompt("Hi") == smollm2.encode_prompt(messages) == expected


BAD_PROMPTS: list[tuple[Any, bool, str]] = [
    (" \n", False, "empty"),
    ("", True, "empty"),
    ([{"role": "user", "content": " "}], False, "empty"),
    ([{"role": "usr", "content": "hi"}], False, "role"),
    ([{"role": "user", "content": ["hi"]}], False, "content"),
    ([{"role": "user", "content": [{"type": "image", "url": "a.png"}]}], False, "part of type 'image'"),
    (["hi"], False, "message must look like"),
    (7, False, "string or a list"),
    ([{"role": "user", "content": "hi"}], True, "raw"),
    ([{"role": "tool", "content": "hi"}], False, "template refuses the prompt: no tools"),
    ("caf\udce9", True, "Unicode"),
]


@pytest.mark.parametrize(("prompt", "raw", "message"), BAD_PROMPTS)
def test_bad_prompts_are_refused_in_one_line(
    codecs: dict[str, TextCodec], prompt: Any, raw: bool, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        codecs["byte-level"].encode_prompt(prompt, raw)
    assert "\n" not in str(caught.value)


def test_only_the_beginning_of_a_huge_prompt_is_tokenized(
    codecs: dict[str, TextCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, sizes = codecs["byte-level"], list[int]()
    tokenize = codec.tokenize

    def counted(text: str, *, special: bool = False) -> list[int]:
        sizes.append(len(text))
        return tokenize(text, special=special)

    monkeypatch.setattr(codec, "tokenize", counted)
    monkeypatch.setattr("offspec.model.tokenizer._BEGINNING", 64)
    text = "the cat sat on the mat, " * 1000
    assert 2 * 50 < len(codec.encode_prompt(text, raw=True, most=50)) < len(text) / 8
    assert max(sizes) < len(text) / 8
    # A short text is not cut.
    for most in (50, 10**6):
        short = "the cat " * 30
        assert codec.encode_prompt(short, raw=True, most=most) == encode(codec, short)


def test_endings_are_gathered_from_all_files(codecs: dict[str, TextCodec], tmp_path: Path) -> None:
    tokenizer = codecs["byte-level"].tokenizer
    assert TextCodec(tokenizer, tmp_path, {}).eos_ids == {1}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    config = {"eos_token_id": 9, "text_config": {"eos_token_id": 10}}
    assert TextCodec(tokenizer, tmp_path, config).eos_ids == {1, 7, 8, 9, 10}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [false, "x", -1, null]}')
    assert TextCodec(tokenizer, tmp_path, {"eos_token_id": None}).eos_ids == {1}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_generation_config_is_an_error(
    codecs: dict[str, TextCodec], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        TextCodec(codecs["byte-level"].tokenizer, tmp_path, {})
    assert "\n" not in str(caught.value)


# Tokenizers.


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": '{"model_type": "gpt2"}'}, "has no tokenizer"),
        ({"tokenizer.json": "{"}, "cannot be read"),
        ({"config.json": '{"model_type": "llama"}', "tokenizer.json": "{}"}, "cannot be read"),
        ({"tokenizer_config.json": '{"tokenizer_class": "NoSuchTokenizer"}'}, "has no tokenizer"),
        (
            {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}'},
            "has no tokenizer",
        ),
    ],
)
def test_a_folder_without_a_good_tokenizer_is_an_error(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_folder_is_never_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_tokenizer(tmp_path / "gpt2")


def changed(codec: TextCodec, folder: Path, tokens: dict[str, str], *added: str) -> Any:
    """Return a copy of a tokenizer with some tokens renamed and others appended."""
    state = json.loads(codec.tokenizer.backend_tokenizer.to_str())
    vocabulary = {tokens.get(name, name): i for name, i in state["model"]["vocab"].items()}
    vocabulary.update({name: len(vocabulary) + n for n, name in enumerate(added)})
    state["model"] |= {"vocab": vocabulary, "merges": []}
    return load_tokenizer(saved(tokenizers.Tokenizer.from_str(json.dumps(state)), folder))


def test_vocabularies_are_compared_by_token(codecs: dict[str, TextCodec], tmp_path: Path) -> None:
    codec = codecs["byte-fallback"]
    ours, size = codec.tokenizer, len(codec.tokenizer.get_vocab())
    padded = changed(codec, tmp_path / "padded", {}, f"[PAD{size}]", "<unused7>", "<|extra_3|>")
    for same in (ours, changed(codec, tmp_path / "same", {}), padded):
        assert same_vocabulary(ours, same) is None and same_vocabulary(same, ours) is None
    longer = changed(codec, tmp_path / "longer", {}, "[PAD1]", "<|call|>")
    reason = same_vocabulary(ours, longer)
    assert reason is not None and f"token {size + 1} is nothing in one and '<|call|>'" in reason
    assert f"{size} and {size + 2} tokens" in reason
    renamed = changed(codec, tmp_path / "renamed", {"▁the": "▁dog", "▁cat": "▁cow"})
    reason = same_vocabulary(renamed, ours)
    first = min(ours.get_vocab()["▁the"], ours.get_vocab()["▁cat"])
    assert reason is not None and f"token {first} is '▁dog' in one and '▁the' in the other" in reason
    inner = changed(codec, tmp_path / "inner", {"▁the": "[PAD1]"})
    assert same_vocabulary(ours, inner) is not None and same_vocabulary(inner, ours) is not None
    assert same_vocabulary(ours, codecs["byte-level"].tokenizer) is not None
