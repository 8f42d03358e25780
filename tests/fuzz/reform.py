"""Changes to what a binary file says, after which its lengths and offsets are right again."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np

Value = Callable[[Random, Any], Any]  # another value in the place of one
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1}
_MOST_VALUES = 2**18  # of a tensor whose shape was changed
_GGML = gguf.GGMLQuantizationType
_KINDS = (_GGML.F32, _GGML.F32, _GGML.F16, _GGML.BF16, _GGML.Q8_0, _GGML.Q4_0, _GGML.Q5_1)
_STRANGE = (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\0\0\0\0", b"\xff\xff\xff\xff")


def reform_gguf(random: Random, file: Path, count: int, another: Value) -> bytes:
    """A GGUF file of float32 with so many keys or tensors changed, written by gguf's own writer."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    kinds = dict.fromkeys(tensors, _GGML.F32)
    for _ in range(count):
        key, way = random.choice(list(keys)), random.random()
        name, other = random.choices(list(tensors), k=2)
        if way < 0.5:
            keys[key] = another(random, keys[key])
        elif way < 0.55:
            del keys[key]
        elif way < 0.6:
            del tensors[name]
        elif way < 0.7:
            tensors[name], tensors[other] = tensors[other], tensors[name]
        elif way < 0.8:
            tensors[name] = np.resize(tensors[name], other_shape(random, list(tensors[name].shape)))
        elif way < 0.9:
            kinds[name] = random.choice(_KINDS)
        else:
            values = np.frombuffer(with_strange_values(random, tensors[name].tobytes()), np.float32)
            tensors[name] = values.reshape(tensors[name].shape)
    writer = gguf.GGUFWriter(file, str(keys.pop("general.architecture", "")))
    for key, value in keys.items():
        add = writer.add_array if isinstance(value, list) else writer.add_key_value
        add(key, value, *(() if isinstance(value, list) else (gguf.GGUFValueType.get_type(value),)))
    for name, values in tensors.items():
        writer.add_tensor(name, gguf.quantize(values, kinds[name]), raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


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


def reform_safetensors(random: Random, data: bytes, count: int) -> bytes:
    """A safetensors file with so many tensors changed."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    metadata = header.pop("__metadata__", None)
    parts = {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}
    for _ in range(count):
        name, other, way = random.choice(list(header)), random.choice(list(header)), random.random()
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
    return _joined(header | ({"__metadata__": metadata} if metadata else {}), parts, size)


def _joined(header: dict[str, Any], parts: dict[str, bytes], header_size: int) -> bytes:
    """The file, where each tensor has the bytes that its shape and type ask for.

    header_size: that the header had, which ends where the data of packs is aligned.
    """
    body = b""
    for name, part in parts.items():
        count = math.prod(header[name]["shape"])
        if count <= _MOST_VALUES:
            size = count * _SIZES.get(header[name]["dtype"], 1)
            part = (part * (size // max(len(part), 1) + 1))[:size].ljust(size, b"\0")
        header[name]["data_offsets"] = [len(body), len(body) + len(part)]
        body += part
    text = json.dumps(header).encode().ljust(header_size)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body
