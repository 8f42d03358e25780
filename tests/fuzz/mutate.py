"""Files as an accident, a bug or a stranger leaves them: a few changes to one that was whole.

A byte changed at random is mostly refused by the first checks, so that little behind them is tried. Changes
to what a file says, after which its lengths, offsets and types are right again, are in `reform`.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.reform import reform_gguf, reform_safetensors
from tests.fuzz.reform_text import reform_manifest, reform_template

_NUMBERS = [0, 1, -1, 2, 3, 7, 255, 2**16, 2**31, 2**32, 2**53, 2**63, 2**64, 10**9, 10**30]
_NUMBERS += [2**31 - 1, 2**63 - 1]
_FLOATS = (0.0, -0.0, 1e-30, 1e30, 1e308, -1.5, float("nan"), float("inf"))
_TEXTS = ["", "\0", "\ud800", "-1", "0", "../../etc/passwd", "/dev/zero", "é" * 50, "a" * 10_000]
_TEXTS += ["\x1b]0;x\x07", "{{ 1/0 }}", "{{ raise_exception('no') }}", "{% for", "[[[[", "true", "null"]
_TEXTS += ["1e999", "%s%n", "\u202e"]
_DEEP = 3000
_BYTES = (b"\0", b"\xff", b"{", b"}", b'"', b"GGUF", b"[" * 64, b"\x7f\xff\xff\xff\xff\xff\xff\xff", b"\n")


def mutate(random: Random, file: Path) -> bytes:
    """The bytes of a whole file with one to three changes."""
    data, count = file.read_bytes(), random.choice((1, 1, 1, 2, 3))
    if random.random() < 0.55 and (reformed := _reformed(random, file, data, count)):
        data, count = reformed, random.choice((0, 0, 0, 1))
    for _ in range(count):
        data = _once(random, data)
    return data


def _reformed(random: Random, file: Path, data: bytes, count: int) -> bytes | None:
    """The file with so many changes after which it still is one; None for a kind without any."""
    if b'"blake2b"' in data[:4000]:
        return reform_manifest(random, data, count)
    if data[:2] in (b"{%", b"{{", b"{#"):
        return reform_template(random, data, count)
    if data[8:9] == b"{":
        return reform_safetensors(random, data, count)
    if data[:4] == b"GGUF":
        with suppress(Exception):  # the writer takes no value of some types
            return reform_gguf(random, file, count, _anything)
    return None


def _once(random: Random, data: bytes) -> bytes:
    if data[:1] == b"{" and random.random() < 0.85:
        return _json(random, data)
    if data[8:9] == b"{" and random.random() < 0.85:
        return _header(random, data)
    if data[:4] == b"GGUF" and random.random() < 0.7:  # what is behind the header only changes values
        return _bytes(random, data[:4000]) + data[4000:]
    return _bytes(random, data)


def _json(random: Random, data: bytes) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(random, data)
    if random.random() < 0.03:
        return b'{"a":' * _DEEP + b"1" + b"}" * _DEEP
    text = json.dumps(_changed(random, value), indent=random.choice((None, 2)))
    if random.random() < 0.05:  # a text that json writes as an escape, as it is
        text = text.replace("\\ud800", "\ud800")
    return text.encode("utf-8", "surrogatepass").replace(b'"<deep>"', b"[" * _DEEP + b"]" * _DEEP)


def _header(random: Random, data: bytes) -> bytes:
    """A safetensors file with another header, of the length that it states or of another."""
    size = int.from_bytes(data[:8], "little")
    text = _json(random, data[8 : 8 + size])
    stated = len(text) if random.random() < 0.9 else random.choice(_NUMBERS) % 2**64
    return stated.to_bytes(8, "little") + text + data[8 + size :]


def _changed(random: Random, value: Any) -> Any:
    """The value with one place in it changed."""
    places = list(_places(value))
    if not places:
        return _anything(random, value)
    holder, key = random.choice(places)
    kind = random.random()
    if kind < 0.65:
        holder[key] = _anything(random, holder[key])
    elif kind < 0.8:
        del holder[key]
    elif kind < 0.9:
        other, place = random.choice(places)
        holder[key] = json.loads(json.dumps(other[place]))
    elif isinstance(holder, dict):
        holder[random.choice(_TEXTS)] = holder[key]
    else:
        holder.insert(key, holder[key])
    return value


def _places(value: Any) -> Any:
    """Holder and key of everything in a JSON value; of a long list, only of its first."""
    if isinstance(value, dict):
        items: Any = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value[:30]))
    else:
        return
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _anything(random: Random, old: Any) -> Any:
    makers: list[Callable[[], Any]] = [
        lambda: random.choice(_NUMBERS),
        lambda: -random.choice(_NUMBERS),
        lambda: random.choice(_FLOATS),
        lambda: random.choice(_TEXTS),
        lambda: random.choice((None, True, False)),
        lambda: [],
        lambda: {},
        lambda: [old],
        lambda: {"a": old},
        lambda: [random.choice(_NUMBERS)] * 3,
        lambda: str(old),
        lambda: "<deep>",
    ]
    if isinstance(old, int) and not isinstance(old, bool):
        makers += [lambda: old + random.choice((-1, 1)), lambda: old * 2, lambda: old // 2, lambda: -old] * 3
    if isinstance(old, list):
        makers += [lambda: old * 2, lambda: old[::-1], lambda: old[:1]] * 2
    return random.choice(makers)()


def _bytes(random: Random, data: bytes) -> bytes:
    at, count = random.randrange(len(data) + 1), random.choice((1, 2, 8, 100, 5000))
    piece = data[at : at + count]
    changes: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + data[at + count :],
        lambda: data[:at] + random.choice(_BYTES) + data[at:],
        lambda: data[:at] + piece + data[at:],
        lambda: data[:at] + random.randbytes(len(piece)) + data[at + len(piece) :],
        lambda: data[:at] + bytes(byte ^ 1 << random.randrange(8) for byte in piece[:1]) + data[at + 1 :],
        lambda: data + random.randbytes(count),
        lambda: _number(random, data, at),
        lambda: _number(random, data, at),
    ]
    return random.choice(changes)()


def _number(random: Random, data: bytes, at: int) -> bytes:
    """Another number in the place of four or eight bytes, as binary formats have them."""
    width = random.choice((4, 8))
    value: int = random.choice(_NUMBERS) % 2 ** (8 * width)
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]
