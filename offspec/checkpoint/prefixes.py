"""Names of tensors of a language model that was published as a part of a multimodal model.

Its `model.layers.0.mlp.up_proj.weight` is then stored as `language_model.model.layers.0.mlp.up_proj.weight`
or `thinker.model.…`. There is no table of prefixes: the prefix is chosen under which most names are found
with the expected shapes.
"""

from collections.abc import Collection, Mapping

from offspec.checkpoint.tensors import Weight

Shape = tuple[int, ...]


def strip_prefixes(
    tensors: Mapping[str, Weight], missing: Mapping[str, Shape], present: Collection[str]
) -> dict[str, Weight]:
    """Return the tensors, renamed without the prefix under which missing names are found.

    Args:
        tensors: Tensors by their names in the checkpoint.
        missing: Names that the model needs and the checkpoint lacks, and their shapes.
        present: Names that the model needs and the checkpoint has. A tensor missing from a module that is
            present is lost, not renamed, and is not searched for.
    """
    found, left = dict(tensors), dict(missing)
    while left:
        hits = dict[tuple[str, str], int]()
        for anchor in {max(left, key=_depth), min(left, key=_depth)}:
            for stored, meant in _pairs(found, anchor):
                if not any(name.startswith(meant) for name in present):
                    hits[stored, meant] = _hits(found, left, stored, meant)
        if not any(hits.values()):
            break
        stored, meant = max(hits, key=lambda pair: (hits[pair], pair))
        found = {_renamed(name, stored, meant, present): weight for name, weight in found.items()}
        before, left = len(left), {name: shape for name, shape in left.items() if name not in found}
        if len(left) == before:
            break
    return found


def _depth(name: str) -> tuple[int, str]:
    return name.count("."), name


def _pairs(found: Collection[str], wanted: str) -> set[tuple[str, str]]:
    """Return pairs of a stored prefix and its counterpart in `wanted`, by names with the same ending."""
    parts = wanted.split(".")
    for first in range(len(parts) - 1):
        tail = ".".join(parts[first:])
        ends = {name.removesuffix(tail) for name in found if name == tail or name.endswith("." + tail)}
        if ends:
            return {(end, wanted.removesuffix(tail)) for end in ends}
    return set()


def _hits(found: Mapping[str, Weight], left: Mapping[str, Shape], stored: str, meant: str) -> int:
    hidden = {name: shape for name, shape in left.items() if name.startswith(meant)}
    places = [(found.get(stored + name.removeprefix(meant)), shape) for name, shape in hidden.items()]
    return sum(weight is not None and weight.shape == shape for weight, shape in places)


def _renamed(name: str, stored: str, meant: str, present: Collection[str]) -> str:
    return meant + name.removeprefix(stored) if name.startswith(stored) and name not in present else name
