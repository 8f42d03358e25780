"""The language model in a model that sees and hears, too: what text does not go through is taken out."""

from typing import Any

import torch

from offspec.checkpoint.meta_model import Unmade


def text_part(model: Any, decoder: torch.nn.Module) -> Any:
    """The innermost model around `decoder` that has a head, with what lies beside these two replaced.

    Text that needs such a part fails loudly, and a trial of the architecture then tells.

    Args:
        model: As transformers makes it, changed in place.
        decoder: A part of it: its stack of layers with embedding and final norm.
    """
    outer: Any
    for outer in reversed(way_to(model, decoder)):
        if outer.get_output_embeddings() is not None:
            model = outer
            break
    way = way_to(model, decoder)
    kept = {id(part) for part in way} | {id(decoder), id(model.get_output_embeddings())}
    kept.add(id(model.get_input_embeddings()))
    for part in way:
        for name, child in part.named_children():
            if not any(id(inner) in kept for inner in child.modules()):
                setattr(part, name, Unmade())
    for part in way[1:]:  # as what stands between two pictures
        for name in part._parameters:
            setattr(part, name, None)
    return model


def way_to(model: torch.nn.Module, inner: torch.nn.Module) -> list[torch.nn.Module]:
    """`model` and the parts that lie around `inner` in it, from the outside to the inside."""
    if model is inner:
        return []
    for child in model.children():
        if any(part is inner for part in child.modules()):
            return [model, *way_to(child, inner)]
    return [model]
