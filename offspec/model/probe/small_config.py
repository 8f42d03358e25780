"""Small configuration of the same architecture: a few narrow layers of every kind.

Sizes are recognized by their names in configurations. Similar sizes are divided by the same number, so that
products and sums still match: heads by one number, head widths by another, model widths by both.
"""

import math
import re
from collections.abc import Iterable
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import Any

VOCABULARY = 128
_POSITIONS = 128  # maximum of a small model
_REACH = 4  # of windows, chunks and selections: the prompt must be longer
_MULTIPLE = 8  # of widths, required by products of experts
_LAYERS = 4  # minimum number of layers

_TOKENS = ("token_id", "token_index")
_HEADS = re.compile(r"heads|n_head$|num_query_groups|multi_query_group_num")
_PER_HEAD = re.compile(r"head_dim|headdim|d_head|dim_head|head_size|rotary_dim|kv_channels|d_kv|d_rel")
# Heads that score keys for a selection. With few heads, many keys would have a score of zero, and the
# selection among these is undefined.
_INDEX, _INDEX_HEADS = "index_n_heads", 16
_ROTARY = ("partial_rotary_factor", "rotary_pct")
_RANK = re.compile(r"rank$")
_WIDTH = re.compile(
    r"hidden_size|intermediate|embd$|emb_dim|embed_dim|embedding_dim|embedding_size|d_model|n_inner|d_inner|"
    r"ffn_dim|ffn_hidden|dim_ff|^dff$|d_ff$|proj_dim|laurel|width|feed_forward_size|dim_model|input_size|"
    r"shared_expert.*size|ffn_size|d_ssm$"
)
_REACHES = re.compile(
    r"window|chunk_size$|chunk_length|topk$|topk_blocks|local_attention$|block_size|floor_scale$"
)
_ROUTES = re.compile(r"moe_topk|chunk_size_feed|max_window|router|expert")
_EXPERTS = re.compile(r"^(moe_)?num_(local_)?experts$|^n_routed_experts$")
_CHOSEN = re.compile(r"^(num_experts_per_tok(en)?|num_selected_experts|moe_top_?k|moe_k|top_k(_experts)?)$")
_SHARED = re.compile(r"(^|mamba_)n_groups$")  # groups of state heads with shared keys
_GROUPS = re.compile(r"^(n_group|num_expert_group)$")
_BOUNDARY = re.compile(r"layers$|first_k_dense|layer_(start|end)_index")
_PLACES = re.compile(r"layers$|layer_ids$|idxs$|indices$")
_POSITION = re.compile(r"max_position|n_positions|n_ctx|max_seq_len|model_max_length|_positions$|seq_length")


def small_config(config: Any, heads: int = 2) -> Any:
    """Return a configuration of the same architecture with a few narrow layers.

    Raises any error of the configuration's class if it rejects the small sizes.

    Args:
        config: Configuration as transformers reads it; not changed.
        heads: Minimum number of heads. Default 2; the code of some models assumes at least 4.
    """
    text = config.get_text_config()
    layers = dict(text.attribute_map).get("num_hidden_layers", "num_hidden_layers")
    try:
        return type(config).from_dict(_shrunk(deepcopy(config.to_dict()), layers, heads))
    except Exception:
        if text is config:
            raise
    whole = deepcopy(config)  # the parts no longer match each other, but only the text matters
    _set_text(whole, whole.get_text_config(), small_config(text, heads))
    return whole


def _set_text(whole: Any, text: Any, small: Any) -> None:
    """Replace the text part of a configuration. Other parts are never built, so their sizes can stay."""
    for name in whole.sub_configs:
        part = getattr(whole, name, None)
        if part is text:
            setattr(whole, name, small)
        elif hasattr(part, "sub_configs"):
            _set_text(part, text, small)


def special_tokens(given: dict[str, Any]) -> set[int]:
    """Return the ids of tokens that are not text, such as image or end tokens."""
    found = set[int]()
    for name, value in given.items():
        if isinstance(value, dict) and "model_type" in value:
            found |= special_tokens(value)
        elif str(name).endswith(_TOKENS):
            found |= set(value) if isinstance(value, list) else {value}
    return found - {None}


def _shrunk(given: dict[str, Any], layers_name: str, heads: int = 2) -> dict[str, Any]:
    """Shrink one level of a configuration and all levels below; keep copies of text sizes consistent."""
    text = dict(given.get("text_config") or {})
    repeated = [name for name, value in text.items() if type(value) is int and given.get(name) == value]
    for name, value in given.items():
        if isinstance(value, dict) and "model_type" in value:
            given[name] = _shrunk(value, layers_name, heads)
    if isinstance(count := given.get(layers_name), int) and count > 0:
        _keep_layers(given, layers_name, count)
    levels = [given, *(given.get("per_layer_config") or {}).values()]
    by_head, by_width = _divisors(given, levels, heads)
    _fewer_groups(levels, by_head)
    _fewer_experts(given)
    for level in levels:
        for name, value in level.items():
            level[name] = _sized(name, value, by_head, by_width)
    for rope in ("rope_parameters", "rope_scaling"):
        if isinstance(given.get(rope), dict):
            given[rope] = _rope(given[rope], by_width)
    return given | {name: given["text_config"][name] for name in repeated}


def _divisors(given: dict[str, Any], levels: Iterable[dict[str, Any]], few: int) -> tuple[int, int]:
    """Return the divisors of head counts, which must stay at least `few`, and of head widths."""
    heads, sizes = list[int](), list[int]()
    for level in levels:
        for name, value in level.items():
            for number in _whole(value):
                if _is_heads(name):
                    heads.append(number)
                elif _PER_HEAD.search(name):
                    sizes.append(number)
    size, count = (
        next((given[name] for name in names if given.get(name)), None)
        for names in (("hidden_size", "n_embd", "d_model"), ("num_attention_heads", "n_head", "n_heads"))
    )
    follows = not given.get("head_dim")  # the head size follows from the width
    if follows and isinstance(size, int) and isinstance(count, int) and size % count == 0:
        sizes.append(size // count)
    common = math.gcd(*heads) if heads else 1
    least = min(heads, default=1)
    by_head = max(n for n in range(1, common + 1) if common % n == 0 and least // n >= min(least, few))
    products = [size * part for size in sizes for part in _rotary_parts(given)]
    rotated = [int(size) for size in products if size % 1 < 0.2]  # other products are not rotary widths
    by_width = 1
    while sizes and all(n % (4 * by_width) == 0 and n // (2 * by_width) >= 8 for n in sizes):
        if any(n % (4 * by_width) for n in rotated):
            break
        by_width *= 2
    return by_head, by_width


def _fewer_groups(levels: Iterable[dict[str, Any]], by_head: int) -> None:
    """Reduce group counts to divisors of the reduced head counts."""
    for level in levels:
        heads = [
            value // by_head for name, value in level.items() if _is_heads(name) for value in _whole(value)
        ]
        for name, value in level.items():
            if _SHARED.search(name) and type(value) is int:
                level[name] = math.gcd(value, *heads)


def _is_heads(name: str) -> bool:
    return bool(_HEADS.search(name)) and not _PER_HEAD.search(name) and name != _INDEX


def _rotary_parts(given: dict[str, Any]) -> list[float]:
    """Return the fractions of a head that rotary embedding rotates; the rotated width must stay even."""
    rope = given.get("rope_parameters")
    levels = [given, *([rope, *rope.values()] if isinstance(rope, dict) else [])]
    parts = [level.get(name) for level in levels if isinstance(level, dict) for name in _ROTARY]
    return [part for part in parts if isinstance(part, float) and 0 < part < 1]


def _fewer_experts(given: dict[str, Any]) -> None:
    """Reduce experts to the fewest that still leave a choice, in the same groups."""
    chosen, groups = (
        max([1, *(value for name, value in given.items() if names.search(name) and type(value) is int)])
        for names in (_CHOSEN, _GROUPS)
    )
    for name, value in given.items():
        if not _EXPERTS.search(name) or type(value) is not int:
            continue
        while value % (2 * groups) == 0 and value // 2 >= max(2 * chosen, 2 * groups):
            value //= 2
        given[name] = value


def _sized(name: str, value: Any, by_head: int, by_width: int) -> Any:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [_sized(name, item, by_head, by_width) for item in value]
    if type(value) is not int or value <= 0:
        return value
    if name.endswith(_TOKENS):
        return min(value, VOCABULARY - 1)
    if "vocab" in name:
        return min(value, VOCABULARY)
    if _POSITION.search(name):
        return min(value, _POSITIONS)
    if _PER_HEAD.search(name):
        return max(value // by_width, 1)
    if _RANK.search(name):
        return max(value // by_width, min(value, _MULTIPLE))
    if name == _INDEX:
        return min(value, _INDEX_HEADS)
    if _HEADS.search(name):
        return max(value // by_head, 1)
    if _REACHES.search(name) and not _ROUTES.search(name):
        return min(value, _REACH)
    if _WIDTH.search(name):
        return -(-value // (by_width * by_head) // _MULTIPLE) * _MULTIPLE
    return value


def _rope(given: dict[str, Any], by_width: int) -> dict[str, Any]:
    """Shrink rotary settings: one factor per frequency, and sections that add up to their number."""
    found = dict[str, Any]()
    for name, value in given.items():
        if isinstance(value, dict):
            value = _rope(value, by_width)
        elif isinstance(value, list) and all(type(item) is int for item in value):
            if name.endswith("section"):
                ends = [0, *(round(end / by_width) for end in accumulate(value))]
                value = [end - start for start, end in pairwise(ends)]
            else:
                value = [max(item // by_width, 1) for item in value]
        elif isinstance(value, list):
            value = value[: max(len(value) // by_width, 1)]
        elif name == "original_max_position_embeddings":
            value = min(value, _POSITIONS)
        found[name] = value
    return found


def _keep_layers(given: dict[str, Any], layers_name: str, count: int) -> None:
    """Keep the first few layers, the last, two of each kind, and those on both sides of a boundary."""
    lists = [value for value in given.values() if isinstance(value, list) and len(value) == count]
    lists = [value for value in lists if not _are_places(value, count)]
    own = given.get("per_layer_config") or {}
    own = {int(index): value for index, value in own.items()}
    kept, met = {*range(min(_LAYERS - 1, count)), count - 1}, dict[str, int]()
    for layer in range(count):
        kind = repr([items[layer] for items in lists] + [own.get(layer)])
        met[kind] = met.get(kind, 0) + 1
        if met[kind] <= 2:
            kept.add(layer)
    for name, value in given.items():
        if name != layers_name and type(value) is int and 0 < value < count and _BOUNDARY.search(name):
            kept |= {value - 1, value, count - value - 1, count - value}
    order = sorted(kept)
    for name, value in given.items():
        if _are_places(value, count) and _PLACES.search(name):
            given[name] = [place for place, layer in enumerate(order) if layer in value]
        elif isinstance(value, list) and len(value) == count:
            given[name] = [value[layer] for layer in order]
        elif name == layers_name:
            given[name] = len(order)
        elif name.startswith("num_kv_shared"):
            given[name] = sum(layer >= count - value for layer in order)
        elif type(value) is int and 0 < value <= count and _BOUNDARY.search(name):
            given[name] = sum(layer < value for layer in order)
    if own:
        width = len(str(len(order) - 1))
        given["per_layer_config"] = {
            f"{place:0{width}d}": own[layer] for place, layer in enumerate(order) if layer in own
        }


def _are_places(value: Any, count: int) -> bool:
    """Return whether a list has layer numbers, instead of one entry per layer."""
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        return False
    return all(0 <= a < b < count for a, b in pairwise(value)) or (len(value) == 1 and 0 <= value[0] < count)


def _whole(value: Any) -> list[int]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if type(item) is int and item > 0]
