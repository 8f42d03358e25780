"""A shared target with its text, for tests that only read it."""

from collections.abc import Iterator

import pytest

from tests.distill.classroom import School


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Iterator[School]:
    opened = School.opened(tmp_path_factory.mktemp("school"))
    yield opened
    opened.target.close()
