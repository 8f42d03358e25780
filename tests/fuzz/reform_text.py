"""Changes to manifests and chat templates after which they still are some."""

import json
import re
from random import Random
from typing import Any

from tests.fuzz.reform import other_shape

_FORMATS = ("nf4", "int8", "int4-g64", "")
_NAMES = ["", "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "x\x1b[2J", "\u202e"]
_NAMES += ["model.layers.9.mlp.up_proj.weight"]
_FILES = ["config.json", "model.safetensors", "model.safetensors.index.json", "..", "a/b.safetensors"]
_FILES += ["model-layer-0009.safetensors", "x\n.safetensors"]
_PLACES = re.compile(rb"(?<=[%}]\})|(?=\{[{%])")  # in a template: before and behind its tags
_VALUES = r"""
m ; messages ; m['content'] ; m.content * 3 ; messages[-1] ; messages[9] ; messages[1:] ; m.missing.part ;
bos_token ; eos_token ; tools ; namespace(a=1) ; range(9) ; range(10**9) ; 'x' * 10**9 ; [1] * 10**9 ;
[[]] * 9999 ; 9 ** 9 ** 9 ; 10 ** 5000 ; 1 / 0 ; -1 ; none ; true ; {} ; '\x1b]0;x\x07\u202e' ;
raise_exception('\x1b[2J') ; strftime_now('%Y' * 9999) ; ''.__class__.__mro__ ; self ;
self.__init__.__globals__ ; loop ; loop.index0 ; cycler('a', 'b') ; joiner(',') ; lipsum() ;
dict(a=messages) ; undefined_name ; m.content.split ; m.content.split() ; '%s %d' % (1,) ;
'{}{}'.format(1) ; '%999999d' % 1
"""
_FILTERS = """
tojson ; tojson(indent=10**8) ; trim ; length ; list ; string ; int ; float ; upper ; first ; last ;
sort ; unique|list ; reverse|list ; map(attribute='content')|list ; selectattr('role')|list ;
groupby('role') ; join('x' * 999) ; replace('', 'y' * 999) ; indent(4000) ; center(9999) ; wordwrap(1) ;
wordcount ; batch(2)|list ; slice(4000)|list ; sum ; pprint ; urlize ; xmlattr ; e ; safe ; items ;
no_such_filter ; default('x') ; format(1) ; truncate(-1) ; round(10**6) ; filesizeformat ; random ;
attr('__class__') ; max
"""
# Tags around a part of a template: "$" is a value, and "…" that part.
_BLOCKS = """
{% for a in $ %}…{% endfor %} ; {% for a in $ recursive %}{{ loop(messages) }}…{% endfor %} ;
{% for a in range(99999) %}{{ $ }}…{% endfor %} ; {% if $ %}…{% else %}no{% endif %} ; {% set a = $ %} ;
{% set ns = namespace(s=$) %}{% set ns.s = ns.s ~ ns.s %} ;
{% macro f(n) %}{{ f($) }}{% endmacro %}{{ f(1) }} ; {% call(x) caller($) %}…{% endcall %} ;
{% filter indent($) %}…{% endfilter %} ; {% generation %}{{ $ }}…{% endgeneration %} ; {% include $ %} ;
{% extends $ %} ; {% block a %}{{ $ }}…{% endblock %} ; {{ $ }} ; {{ $ }}{% continue %} ;
{{ $ }}{% break %} ; {% raw %}{{ $ }}…{% endraw %} ; {# $ #}
"""


def _choice(random: Random, table: str) -> str:
    """One of what a table has between its semicolons."""
    return random.choice(re.split(r"\s;\s", table.strip()))


def reform_manifest(random: Random, data: bytes, count: int) -> bytes:
    """A pack's manifest with so many other weights, files or formats."""
    value = json.loads(data)
    for _ in range(count):
        way, weights = random.random(), [entry["weights"] for entry in value["files"].values()]
        if way < 0.4:
            _change_weight(random, random.choice(list(filter(None, weights))), random.choice(weights))
        elif way < 0.65:
            _change_files(random, value.get(random.choice(("files", "texts"))) or value["files"])
        elif way < 0.75:
            value["format"] = random.choice(_FORMATS)
        elif way < 0.85:
            value |= {"model": random.choice(_NAMES), "fingerprint": random.choice(_NAMES)}
        else:
            value.pop("texts", None)
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
        weights[name] = [weights[name][0] * 2, *[size // 2 for size in weights[name][1:]]]
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


def reform_template(random: Random, data: bytes, count: int) -> bytes:
    """A chat template with so many more tags, which jinja mostly parses."""
    for _ in range(count):
        value = _choice(random, _VALUES)
        for _ in range(random.choice((0, 0, 1, 2))):
            value = f"({value})|{_choice(random, _FILTERS)}"
        begin, _, end = _choice(random, _BLOCKS).replace("$", value).partition("…")
        places = [match.start() for match in _PLACES.finditer(data)] or [0, len(data)]
        first, last = sorted(random.choices(places, k=2))
        if random.random() < 0.3:
            first, last = 0, len(data)
        data = data[:first] + begin.encode() + data[first:last] + end.encode() + data[last:]
    return data
