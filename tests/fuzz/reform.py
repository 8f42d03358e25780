"""Changes to what a binary file says, after which its lengths and offsets are right again.

A byte changed at random is mostly refused by the checks of the header, so that little else is tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.gguf_form import ARRAY, BOOL, FLOAT, LONG, STRING, Entry, Tensor, join, parse

Value = Callable[[Random, Any], Any]  # another value in the place of one
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}
_SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1, "I16": 2}
_MOST_VALUES = 2**18  # of a tensor whose shape was changed
_GGML_KINDS = (0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 24, 26, 28, 30, 39)
_STRANGE = (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff")


def reform_gguf(random: Random, data: bytes, another: Value) -> bytes:
    """A GGUF file with one key or one tensor changed. Raises ValueError for what is none."""
    entries, tensors = parse(data)
    if tensors and (not entries or random.random() < 0.4):
        _change_tensor(random, tensors)
    elif entries:
        _change_entry(random, entries, another)
    return join(entries, tensors)


def _change_entry(random: Random, entries: list[Entry], another: Value) -> None:
    at = random.randrange(len(entries))
    entry, way = entries[at], random.random()
    if way < 0.1:
        del entries[at]
    elif way < 0.2:
        other = random.choice(entries)
        entry.kind, entry.value, entry.inner = other.kind, other.value, other.inner
    elif entry.kind == ARRAY and entry.value and way < 0.8:
        _change_list(random, entry, another)
    else:
        _give(entry, another(random, entry.value))


def _change_list(random: Random, entry: Entry, another: Value) -> None:
    values = list(entry.value)
    at = random.randrange(len(values))
    changes: list[Callable[[], Any]] = [
        lambda: [*values[:at], another(random, values[at]), *values[at + 1 :]],
        lambda: [*values[:at], another(random, values[at]), *values[at + 1 :]],
        lambda: values[:at] + values[at + 1 :],
        lambda: [*values[:at], values[at], *values[at:]],
        lambda: values[:at],
        lambda: values[::-1],
        lambda: [values[at]] * len(values),
        lambda: [],
    ]
    entry.value = random.choice(changes)()


def _give(entry: Entry, value: Any) -> None:
    """Another value, of the key's own kind where that can hold one of its type."""
    if isinstance(value, list):
        entry.inner = entry.inner if entry.kind == ARRAY else entry.kind
        entry.kind, entry.value = ARRAY, value
        return
    if entry.kind == ARRAY or isinstance(value, str | dict | None):
        entry.kind = STRING
    if isinstance(value, bool):
        entry.kind = BOOL
    elif isinstance(value, float):
        entry.kind = FLOAT
    elif isinstance(value, int) and entry.kind == STRING:
        entry.kind = LONG
    entry.value = value


def _change_tensor(random: Random, tensors: list[Tensor]) -> None:
    at = random.randrange(len(tensors))
    tensor, other, way = tensors[at], random.choice(tensors), random.random()
    if way < 0.1:
        del tensors[at]
    elif way < 0.2:
        tensor.name, other.name = other.name, tensor.name
    elif way < 0.25:
        tensor.name = random.choice((other.name, f"{tensor.name}x", "blk.99.attn_q.weight", "", "\0"))
    elif way < 0.45:
        tensor.kind = random.choice(_GGML_KINDS)
        tensor.fit()
    elif way < 0.8:
        tensor.dims = other_shape(random, tensor.dims)
        tensor.fit()
    else:
        tensor.data = with_strange_values(random, tensor.data)


def other_shape(random: Random, dims: list[int]) -> list[int]:
    """A shape with one thing changed, which is still small."""
    dims = list(dims)
    at = random.randrange(len(dims)) if dims else 0
    size = dims[at] if dims else 1
    changes: list[Callable[[], list[int]]] = [
        lambda: dims[::-1],
        lambda: [*dims, 1],
        lambda: [1, *dims],
        lambda: dims[:at] + dims[at + 1 :],
        lambda: [*dims[:at], size + random.choice((-1, 1)), *dims[at + 1 :]],
        lambda: [*dims[:at], size * 2, *dims[at + 1 :]],
        lambda: [*dims[:at], size // 2, *dims[at + 1 :]],
        lambda: [*dims[:at], random.choice((0, 1, 32, 256)), *dims[at + 1 :]],
    ]
    return [max(size, 0) for size in random.choice(changes)()]


def with_strange_values(random: Random, data: bytes) -> bytes:
    """Some values that are no numbers, infinite, very large, or zero."""
    for _ in range(random.choice((1, 4, 64))):
        at = random.randrange(len(data) // 4 + 1) * 4
        if at + 4 <= len(data):
            data = data[:at] + random.choice(_STRANGE) + data[at + 4 :]
    return data


def reform_safetensors(random: Random, data: bytes) -> bytes:
    """A safetensors file with one tensor changed. Raises ValueError for what is none."""
    header, parts = _parts(data)
    names = [name for name in header if name != "__metadata__"]
    if not names:
        raise ValueError("no tensors")
    name, other, way = random.choice(names), random.choice(names), random.random()
    if way < 0.1:
        del header[name], parts[name]
    elif way < 0.2:
        header[name], header[other] = header[other], header[name]
        parts[name], parts[other] = parts[other], parts[name]
    elif way < 0.4:
        header[name]["dtype"] = random.choice(list(_SIZES))
    elif way < 0.8:
        header[name]["shape"] = other_shape(random, header[name]["shape"])
    else:
        parts[name] = with_strange_values(random, parts[name])
    return _joined(header, parts, int.from_bytes(data[:8], "little"))


def _parts(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    size = int.from_bytes(data[:8], "little")
    try:
        header: dict[str, Any] = json.loads(data[8 : 8 + size])
        body = data[8 + size :]
        offsets = {n: header[n]["data_offsets"] for n in header if n != "__metadata__"}
        parts = {name: body[begin:end] for name, (begin, end) in offsets.items()}
        shapes = [header[name]["shape"] for name in parts if header[name]["dtype"]]
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError("no safetensors file") from error
    if not all(isinstance(shape, list) and set(map(type, shape)) <= {int} for shape in shapes):
        raise ValueError("no safetensors file")
    return header, parts


def _joined(header: dict[str, Any], parts: dict[str, bytes], header_size: int) -> bytes:
    """The file, where each tensor has the bytes that its shape and type ask for.

    header_size: that the header had, which ends where the data of packs is aligned.
    """
    body = b""
    for name, part in parts.items():
        count = 1
        for size in header[name]["shape"]:
            count *= size
        if 0 <= count <= _MOST_VALUES:
            size = count * _SIZES.get(str(header[name]["dtype"]), 1)
            part = (part * (size // max(len(part), 1) + 1))[:size].ljust(size, b"\0")
        header[name]["data_offsets"] = [len(body), len(body) + len(part)]
        body += part
    text = json.dumps(header).encode()
    text = text.ljust(header_size) + b" " * (-len(text) % 8 if len(text) > header_size else 0)
    return len(text).to_bytes(8, "little") + text + body
