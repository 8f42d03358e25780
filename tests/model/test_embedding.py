"""Rows of an embedding, from disk, or from RAM for a draft."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.model.attention import TreeContext
from offspec.stream.direct_reader import DirectReader
from offspec_planners.placement import Placement
from tests.support.tiny_models import nothing, open_model, write_model

_CPU = torch.device("cpu")


def test_rows_from_ram_equal_those_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = DirectReader.read_into, list[int]()

    def note(*args: Any) -> int:
        reads.append(1)
        return read(*args)

    monkeypatch.setattr(DirectReader, "read_into", note)
    folder, states = write_model(tmp_path / "model", tie_word_embeddings=False), list[torch.Tensor]()
    for holds_rows in (False, True):
        model = open_model(folder, torch.bfloat16)
        everywhere = Placement.in_memory(len(model.layers), range(len(model.layers)), 0)
        model.load(everywhere, 64, nothing, embedding_in_ram=holds_rows)
        assert model.embedding_bytes >= 96 * 32 * 4
        reads.clear()
        with torch.inference_mode():
            states.append(model.tree_model.hidden(torch.arange(3, 40), TreeContext.chain(37, _CPU)))
        model.close()
        assert bool(reads) is not holds_rows, "a draft's step must not wait for a disk that is busy"
    assert torch.equal(states[0], states[1])
