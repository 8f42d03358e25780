"""Names of a model's tensors under the prefix of something larger that they were published in.

A language model may be a part of one that sees and hears: its `model.layers.0.mlp.up_proj.weight` is then
called `language_model.model.layers.0.mlp.up_proj.weight`, or `thinker.model.…`. No table says which prefixes
there are: the one is taken under which most of the names are found, with the shapes that they must have.
"""

from collections.abc import Collection, Mapping

from offspec.checkpoint.tensors import Weight

Shape = tuple[int, ...]


def strip_prefixes(
    tensors: Mapping[str, Weight], missing: Mapping[str, Shape], present: Collection[str]
) -> dict[str, Weight]:
    """The tensors by other names: those under a prefix that hides names that are missing go without it.

    Args:
        tensors: By their names in the checkpoint.
        missing: Names that a model needs and that are not found, and their shapes.
        present: Names that it needs and that are found. What lies beside them is not hidden but lost, and is
            looked for nowhere else.
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
    """Prefixes of stored names, and what stands for them in `wanted`, which ends alike."""
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
