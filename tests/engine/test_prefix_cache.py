"""Conversations that go on from disk: the same tokens, and hardly a prompt read twice."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import SamplingParams
from offspec.core import files
from offspec.core.events import Event, Finished, Notice, Result
from offspec.engine import prefix_cache
from offspec.engine.engine import Engine
from offspec.engine.prefix_cache import PrefillRate
from offspec.model import cache_file
from offspec_planners.placement import Placement, Tier
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import HYBRIDS, tiny_engine, write_hybrid, write_model

A = [3 + (7 * i * i + i) % 90 for i in range(60)]
B = [*A[:6], *(3 + (11 * i * i + 5 * i) % 90 for i in range(60))]
C = [3 + (5 * i * i + 3 * i) % 90 for i in range(60)]
ROOM = 1 << 30
CUDA = torch.device("cuda")
_DISK, _RAM, _GPU = Tier.DISK, Tier.HOST, Tier.DEVICE

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "int8": ("llama", {"int8_cache": True}),
    "no keys of its own": ("gemma3n_text", {}),
    "one latent": ("deepseek_v3", {"int8_cache": True}),
    "delta rule": ("qwen3_5_text", {}),
    "mamba beside attention": ("falcon_h1", {}),
    "no attention": ("mamba", {}),
}
ON_GPU = {"placement": Placement((_DISK, _GPU, _RAM), 2, 2, caches=_RAM), "device": CUDA}
ON_TWO = {
    "placement": Placement((_GPU, _GPU, _RAM), 2, 2, gpus=(0, 1, 1)),
    "device": torch.device("cuda:0"),
    "more_devices": [torch.device("cuda:1")],
}
GPU_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("llama", ON_GPU),
    "int8 windows": ("llama", {"int8_cache": True, **ON_GPU}),
    "short convolution": ("lfm2", {"device": CUDA}),
    "two GPUs": ("llama", ON_TWO),
}
MORE = ("windows", "int8 windows")  # for make test-all


def _params(temperature: float = 0.0, tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=6, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def write(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family) / "model"
        return write_hybrid(folder, family) if family in HYBRIDS else write_model(folder, family)

    return write


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short conversations are worth a file here, however quickly a tiny model reads them."""
    monkeypatch.setattr(prefix_cache, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(prefix_cache, "LEAST", 8)
    monkeypatch.setattr(PrefillRate, "seconds", lambda self, rows: None)
    yield tmp_path / "cache" / "prefixes"


def kept(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def turns(engine: Engine, order: Sequence[list[int]], temperature: float = 0.0) -> list[Result]:
    """Conversations that go on in turns, each from its own answer with a question more."""
    texts = {id(text): list(text) for text in order}
    found = list[Result]()
    for text in order:
        so_far = texts[id(text)]
        result = engine.generate(so_far, _params(temperature))
        found.append(result)
        so_far += [*result.token_ids, 9, 10, 11]
    return found


def notices(events: Sequence[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


def tokens(results: Sequence[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("dense", 0.0),
        ("int8", 0.7),
        ("delta rule", 0.7),
        pytest.param("mamba beside attention", 0.0, marks=pytest.mark.exhaustive),
        ("no attention", 0.7),
        pytest.param("no keys of its own", 0.7, marks=pytest.mark.exhaustive),
        pytest.param("one latent", 0.7, marks=pytest.mark.exhaustive),
        *(
            pytest.param(kind, 0.7, marks=[pytest.mark.gpu] + [pytest.mark.exhaustive] * (kind in MORE))
            for kind in GPU_KINDS
        ),
    ],
)
def test_two_conversations_in_turns(kind: str, temperature: float, written: Callable[[str], Path]) -> None:
    family, options = (KINDS | GPU_KINDS)[kind]
    if "more_devices" in options and torch.cuda.device_count() < 2:
        pytest.skip("takes two GPUs")
    plain = {key: value for key, value in options.items() if key == "int8_cache"}
    order, folder = [A, B, A, B], written(family)
    with tiny_engine(folder, "none", budget=1, **plain) as engine:
        expected = turns(engine, order, temperature)
    with tiny_engine(folder, "suffix", budget=24, cache_size=ROOM, **options) as engine:
        said = turns(engine, order, temperature)
    assert tokens(said) == tokens(expected)
    assert len(set(tokens(said))) == 4, "the test model emits too few tokens to detect errors"
    prompts = sum(result.prompt_tokens for result in said[2:])
    assert sum(result.reused_tokens for result in said[2:]) >= 0.9 * prompts
    before = sum(result.reused_tokens for result in expected[2:])
    assert before < 0.2 * prompts, "without files there is nothing to go on from"


def test_caches_of_another_arithmetic_are_computed_again(
    written: Callable[[str], Path], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version of offspec or a library may have rounded otherwise."""

    def reused() -> int:
        with tiny_engine(written("llama"), "none", budget=1, cache_size=ROOM) as engine:
            engine.generate(B, _params())  # puts the other out
            return engine.generate([*A, 9], _params()).reused_tokens

    with tiny_engine(written("llama"), "none", budget=1, cache_size=ROOM) as engine:
        engine.generate(A, _params())
        engine.generate(B, _params())
    assert reused() >= len(A) - 1
    monkeypatch.setattr(torch.__config__, "show", lambda: "PyTorch built with another oneDNN")
    assert reused() < 8 and reused() >= len(A) - 1


@pytest.mark.parametrize("kind", ["dense", "delta rule"])
def test_after_a_restart(kind: str, small: Path, written: Callable[[str], Path]) -> None:
    """The final cache is on disk, readable by its owner only; other models do not use it."""
    family, options = KINDS[kind]
    load = partial(tiny_engine, written(family), "suffix", budget=24, **options)
    with load(cache_size=ROOM) as engine:
        first = engine.generate(A, _params(0.7))
    assert small.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in kept(small)] == [0o600]
    longer = [*A, *first.token_ids, 9, 10, 11]
    with load() as engine:
        expected = engine.generate(longer, _params(0.7))
    with load(cache_size=ROOM) as engine:
        said = engine.generate(longer, _params(0.7))
    assert said.token_ids == expected.token_ids
    assert said.reused_tokens == len(A) + first.tokens - 1 and not expected.reused_tokens
    assert len(kept(small)) == 1, "what it went on to has taken the place of what it was"
    with tiny_engine(written("qwen3"), "none", budget=1, cache_size=ROOM) as other:
        assert not other.generate(A, _params()).reused_tokens
    assert len(kept(small)) == 2


def test_nothing_is_kept_unasked(small: Path, written: Callable[[str], Path]) -> None:
    with tiny_engine(written("llama"), "none", budget=1) as engine:
        turns(engine, [A, B, A])
    assert not small.exists()


@pytest.mark.usefixtures("drafters_stay")
def test_a_draft_has_nothing_of_another_conversation(written: Callable[[str], Path]) -> None:
    """The draft computes the whole prompt, so its acceptance rate equals that of a fresh engine."""
    folder = written("llama")
    with tiny_engine(folder, "self", budget=24) as alone:
        expected = turns(alone, [A, A])[-1]
    with tiny_engine(folder, "self", budget=24, cache_size=ROOM) as engine:
        said = turns(engine, [A, B, A])[-1]
    assert said.reused_tokens >= 0.9 * said.prompt_tokens
    assert (said.token_ids, said.passes) == (expected.token_ids, expected.passes)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-900] ^= 16
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def exchange(file: Path) -> None:
    """An intact file of another model."""
    found = cache_file.read_cache_header(file, file.name[:16])
    content = file.read_bytes().replace(file.name[:16].encode(), b"0" * 16)
    assert len(found.ids) and content != file.read_bytes()
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "harm"),
    sampled_params(
        [("mamba beside attention", flip), ("dense", cut), ("dense", exchange)],
        ("dense", cut),
        ("dense", exchange),
    ),
)
def test_a_damaged_file_is_reported_and_removed(
    kind: str, harm: Callable[[Path], None], small: Path, written: Callable[[str], Path]
) -> None:
    family, options = KINDS[kind]
    told = list[Event]()
    load = partial(tiny_engine, written(family), "suffix", budget=24, notify=told.append, **options)
    with load() as engine:
        expected = turns(engine, [A, A])[-1]
    with load(cache_size=ROOM) as engine:
        turns(engine, [A])
    (file,) = kept(small)
    harm(file)
    with load(cache_size=ROOM) as engine:
        engine.generate(C, _params())
        said = turns(engine, [A])[0], engine.generate([*A, *expected.token_ids], _params())
        assert said[0].reused_tokens < 6, "what it shares with C"
        again = turns(engine, [A, A])[-1]
    assert again.token_ids == expected.token_ids
    (text,) = notices(told)
    assert "computed again" in text and str(file) in text and "download" not in text


def test_another_process_may_remove_a_file(
    small: Path, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions in the cache are still used. An abandoned partial file is deleted at the next save."""
    told, read = list[Event](), cache_file.read_cache
    with tiny_engine(written("llama"), "none", budget=1, cache_size=ROOM, notify=told.append) as engine:
        turns(engine, [A, [*A[:30], *C]])

        def late(found: cache_file.CacheFile, *given: Any) -> None:
            found.path.unlink()
            read(found, *given)

        monkeypatch.setattr(prefix_cache, "read_cache", late)
        old, new = (small / f".x.safetensors.{name}.partial" for name in ("old", "new"))
        for file in (old, new):
            file.touch()
        os.utime(old, (1e9, 1e9))
        assert engine.generate(A, _params()).reused_tokens == 30
        assert not notices(told) and new.exists() and not old.exists()


def test_the_limit_holds_and_the_oldest_leave_first(small: Path, written: Callable[[str], Path]) -> None:
    folder, told = written("llama"), list[Event]()
    with tiny_engine(folder, "none", budget=1, cache_size=ROOM) as engine:
        engine.generate(A, _params())
    (file,) = kept(small)
    one = file.stat().st_size
    file.unlink()
    with tiny_engine(folder, "none", budget=1, cache_size=int(2.5 * one), notify=told.append) as engine:
        for number, text in enumerate([A, B, C, A]):
            engine.generate(text, _params())
            for age, path in enumerate(sorted(kept(small), key=lambda path: path.stat().st_mtime)):
                os.utime(path, (1e9 + 10 * number + age,) * 2)
            assert sum(path.stat().st_size for path in kept(small)) <= 2.5 * one
        assert len(kept(small)) == 2
        assert engine.generate(C, _params()).reused_tokens == len(C) - 1, "B left, while A was read"
        assert engine.generate(B, _params()).reused_tokens < 8
    assert not notices(told)
    with tiny_engine(folder, "none", budget=1, cache_size=one // 2, notify=told.append) as engine:
        turns(engine, [A, B, A])
    assert len(notices(told)) == 1 and "`cache_size`" in notices(told)[0]


def test_a_full_disk_costs_the_file_alone(
    small: Path, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told = written("llama"), list[Event]()
    with tiny_engine(folder, "none", budget=1) as engine:
        expected = tokens(turns(engine, [A, B, A]))

    def full(fd: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with tiny_engine(folder, "none", budget=1, cache_size=ROOM, notify=told.append) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("offspec.checkpoint.safetensors_writer.write_all", full)
            assert tokens(turns(engine, [A, B, A])) == expected
        assert not kept(small)
        assert len(notices(told)) == 2 and "was not saved: the disk is full" in notices(told)[0]
    assert len(kept(small)) == 1


@pytest.mark.parametrize(
    ("kind", "moment", "leaves"),
    sampled_params(
        [("delta rule", 5, False), ("dense", 0, False), ("dense", 2, True), ("delta rule", 0, True)],
        ("dense", 2, True),
        ("delta rule", 5, False),
    ),
)
def test_an_interrupt_leaves_no_file_and_a_usable_engine(
    kind: str, moment: int, leaves: bool, small: Path, written: Callable[[str], Path]
) -> None:
    """Ctrl-C or a disconnected client, while a conversation is written or another one is read."""
    family, options = KINDS[kind]
    with tiny_engine(written(family), "none", budget=1) as engine:
        expected = tokens(turns(engine, [A, B, C, A, B]))

    def broken_off(engine: Engine, prompt: Sequence[int], place: str, call: Callable[..., Any]) -> None:
        halt, calls = threading.Event(), iter(range(1000))

        def strike(*given: Any) -> Any:
            if next(calls) == moment:
                if not leaves:
                    raise KeyboardInterrupt
                halt.set()
            return call(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, strike)
            if not leaves:
                with pytest.raises(KeyboardInterrupt):
                    engine.generate(prompt, _params())
                return
            *_, last = engine.stream(prompt, _params(), halt=halt)
        assert isinstance(last, Finished) and next(calls) <= moment + 6, "it is not waited for"
        assert (last.result.finish_reason, last.result.passes) == ("halted", 0)

    with tiny_engine(written(family), "suffix", budget=24, cache_size=ROOM, **options) as engine:
        first = engine.generate(A, _params())
        broken_off(engine, B, "offspec.checkpoint.safetensors_writer.write_all", files.write_all)
        assert not kept(small)
        second = engine.generate(B, _params())
        longer = [*A, *first.token_ids, 9, 10, 11]
        broken_off(engine, longer, "offspec.model.cache_file._fill", cache_file._fill)
        assert len(kept(small)) == 2
        third = engine.generate(C, _params())
        fourth = engine.generate(longer, _params())
        assert fourth.reused_tokens >= 0.9 * fourth.prompt_tokens
        fifth = engine.generate([*B, *second.token_ids, 9, 10, 11], _params())
    assert tokens([first, second, third, fourth, fifth]) == expected


def test_only_new_files_are_looked_at(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[Path]()

    def look_at(path: Path, key: str) -> cache_file.CacheFile:
        looked.append(path)
        return cache_file.read_cache_header(path, key)

    monkeypatch.setattr(prefix_cache, "read_cache_header", look_at)
    with tiny_engine(written("llama"), "none", budget=1, cache_size=ROOM) as engine:
        turns(engine, [A, B, C, A, B, C, A])
    assert len(looked) == len(set(looked)) >= 3


def test_check_computes_anew(written: Callable[[str], Path]) -> None:
    """The second answer of a check does not use saved caches."""
    with tiny_engine(written("llama"), "suffix", budget=24, cache_size=ROOM) as engine:
        for text in (A, B):
            engine.generate(text, _params())
        begin, reused = engine._states.first.begin, list[int]()
        engine._states.first.begin = lambda *given: reused.append(begin(*given)) or reused[-1]  # type: ignore
        assert engine.generate(A, _params(), check=True).mismatches == ()
    assert reused == [len(A) - 1, 0]


def test_a_file_is_read_where_that_is_quicker(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_engine(written("llama"), "none", budget=1, cache_size=ROOM) as engine:
        store = engine._states.first._prefixes
        assert store is not None
        turns(engine, [A, B])
        for seconds, reused in ((1e-9, 6), (1e9, len(A) - 1)):
            monkeypatch.setattr(PrefillRate, "seconds", lambda self, rows, seconds=seconds: seconds)
            store._disk_rate = 1e6
            assert engine.generate(A, _params(tokens=1)).reused_tokens == reused
            engine.generate(B, _params())
