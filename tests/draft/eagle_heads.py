"""EAGLE heads, opened for a target."""

from pathlib import Path

import pytest

from offspec.draft.heads.base import TargetShape
from offspec.draft.heads.eagle import OpenedEagle, opened, recognises
from offspec.draft.heads.files import open_files
from offspec.model.parts import TargetParts
from tests.support.eagle_files import LAYERS
from tests.support.tiny_models import load_all, open_model, write_model


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> TargetParts:
    model = open_model(write_model(tmp_path_factory.mktemp("eagle") / "target", num_hidden_layers=LAYERS))
    load_all(model, 16)
    return TargetParts(model)


def shape_of(parts: TargetParts) -> TargetShape:
    return TargetShape(
        "target", parts.hidden_size, parts.vocab_size, parts.layers, parts.dtype, parts.device, parts.config
    )


def open_head(folder: Path, parts: TargetParts) -> OpenedEagle:
    files = open_files(folder, str(folder))
    assert files is not None and recognises(files.config, files.names)
    found = opened(files, shape_of(parts))
    assert isinstance(found, OpenedEagle)
    return found
