"""Changes to manifests and chat templates after which they still are some.

A byte changed at random leaves a template that jinja does not parse, and a manifest that is refused by the
types of its fields, so that little behind that is tried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.reform import other_shape

_FORMATS = ("nf4", "int8", "int4-g64", "")
_NAMES = (
    "",
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.9.mlp.up_proj.weight",
    "x\x1b[2J",
    "\u202e",
)
_FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-layer-0009.safetensors",
    "..",
    "a/b.safetensors",
    "x\n.safetensors",
)
_PLACES = re.compile(rb"(?<=[%}]\})|(?=\{[{%])")  # in a template: before and behind its tags
_VALUES = (
    "m",
    "messages",
    "m['content']",
    "m.content * 3",
    "messages[-1]",
    "messages[9]",
    "messages[1:]",
    "m.missing.part",
    "bos_token",
    "eos_token",
    "tools",
    "namespace(a=1)",
    "range(9)",
    "range(10**9)",
    "'x' * 10**9",
    "[1] * 10**9",
    "[[]] * 9999",
    "9 ** 9 ** 9",
    "10 ** 5000",
    "1 / 0",
    "-1",
    "none",
    "true",
    "{}",
    "'\\x1b]0;x\\x07\\u202e'",
    "raise_exception('\\x1b[2J')",
    "strftime_now('%Y' * 9999)",
    "''.__class__.__mro__",
    "self",
    "self.__init__.__globals__",
    "loop",
    "loop.index0",
    "cycler('a', 'b')",
    "joiner(',')",
    "lipsum()",
    "dict(a=messages)",
    "undefined_name",
    "m.content.split",
    "m.content.split()",
    "'%s %d' % (1,)",
    "'{}{}'.format(1)",
    "'%999999d' % 1",
)
_FILTERS = (
    "tojson",
    "tojson(indent=10**8)",
    "trim",
    "length",
    "list",
    "string",
    "int",
    "float",
    "upper",
    "first",
    "last",
    "sort",
    "unique|list",
    "reverse|list",
    "map(attribute='content')|list",
    "selectattr('role')|list",
    "groupby('role')",
    "join('x' * 999)",
    "replace('', 'y' * 999)",
    "indent(4000)",
    "center(9999)",
    "wordwrap(1)",
    "wordcount",
    "batch(2)|list",
    "slice(4000)|list",
    "sum",
    "pprint",
    "urlize",
    "xmlattr",
    "e",
    "safe",
    "items",
    "no_such_filter",
    "default('x')",
    "format(1)",
    "truncate(-1)",
    "round(10**6)",
    "filesizeformat",
    "random",
    "attr('__class__')",
    "max",
)
_BLOCKS = (
    ("{%% for a in %s %%}", "{%% endfor %%}"),
    ("{%% for a in %s recursive %%}{{ loop(messages) }}", "{%% endfor %%}"),
    ("{%% for a in range(99999) %%}{{ %s }}", "{%% endfor %%}"),
    ("{%% if %s %%}", "{%% else %%}no{%% endif %%}"),
    ("{%% set a = %s %%}", ""),
    ("{%% set ns = namespace(s=%s) %%}{%% set ns.s = ns.s ~ ns.s %%}", ""),
    ("{%% macro f(n) %%}{{ f(%s) }}{%% endmacro %%}{{ f(1) }}", ""),
    ("{%% call(x) caller(%s) %%}", "{%% endcall %%}"),
    ("{%% filter indent(%s) %%}", "{%% endfilter %%}"),
    ("{%% generation %%}{{ %s }}", "{%% endgeneration %%}"),
    ("{%% include %s %%}", ""),
    ("{%% extends %s %%}", ""),
    ("{%% block a %%}{{ %s }}", "{%% endblock %%}"),
    ("{{ %s }}", ""),
    ("{{ %s }}{%% continue %%}", ""),
    ("{{ %s }}{%% break %%}", ""),
    ("{%% raw %%}{{ %s }}", "{%% endraw %%}"),
    ("{# %s #}", ""),
)


def reform_manifest(random: Random, data: bytes) -> bytes:
    """A pack's manifest with another weight, file or format. Raises ValueError for what is none."""
    try:
        value = json.loads(data)
        weights = [entry["weights"] for entry in value["files"].values()]
        holders = [found for found in weights if found]
        changes: list[Callable[[], Any]] = [
            lambda: _change_weight(random, random.choice(holders), random.choice(weights)),
            lambda: _change_weight(random, random.choice(holders), random.choice(weights)),
            lambda: _change_weight(random, random.choice(holders), random.choice(weights)),
            lambda: _change_files(random, value["files"]),
            lambda: _change_files(random, value["texts"]),
            lambda: value.update(format=random.choice(_FORMATS)),
            lambda: value.update(model=random.choice(_NAMES), fingerprint=random.choice(_NAMES)),
            lambda: value.pop("texts"),
        ]
        random.choice(changes)()
    except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError("no manifest") from error
    return json.dumps(value, indent=1).encode()


def _change_weight(random: Random, weights: dict[str, Any], others: dict[str, Any]) -> None:
    name, other, way = random.choice(list(weights)), random.choice(list(weights)), random.random()
    if way < 0.2:
        del weights[name]
    elif way < 0.3:
        others[name] = weights.pop(name)
    elif way < 0.4:
        weights[random.choice(_NAMES)] = weights[name]
    elif way < 0.5:
        weights[name], weights[other] = weights[other], weights[name]
    elif way < 0.6:
        weights[name] = weights[name][::-1]
    elif way < 0.7:  # as many values, in other rows
        rows, columns = weights[name]
        weights[name] = random.choice(
            ([rows * 2, columns // 2], [rows // 2, columns * 2], [1, rows, columns])
        )
    else:
        weights[name] = other_shape(random, weights[name])


def _change_files(random: Random, files: dict[str, Any]) -> None:
    name, other, way = random.choice(list(files)), random.choice(list(files)), random.random()
    if way < 0.3:
        del files[name]
    elif way < 0.5:
        files[name], files[other] = files[other], files[name]
    elif way < 0.8:
        files[random.choice(_FILES)] = files[name]
    else:
        files[random.choice(_FILES)] = files.pop(name)


def reform_template(random: Random, data: bytes) -> bytes:
    """A chat template with one tag more, which jinja mostly parses."""
    value = random.choice(_VALUES)
    for _ in range(random.choice((0, 0, 1, 2))):
        value = f"({value})|{random.choice(_FILTERS)}"
    begin, end = random.choice(_BLOCKS)
    places = [match.start() for match in _PLACES.finditer(data)] or [0, len(data)]
    first, last = sorted(random.choices(places, k=2))
    if random.random() < 0.3:
        first, last = 0, len(data)
    return (
        data[:first]
        + (begin % value).encode()
        + data[first:last]
        + end.replace("%%", "%").encode()
        + data[last:]
    )
