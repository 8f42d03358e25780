"""Files for timing disk reads."""

import shutil
from pathlib import Path

from offspec.plan.hardware_profile import in_folder


def test_folder_that_vanishes_during_the_search(tmp_path: Path) -> None:
    """Like the folders of /proc, or one that another program removes."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    found = in_folder(tmp_path)
    seen = next(path for path in found if path.name == "file")
    shutil.rmtree(tmp_path / ("b" if seen.parent.name == "a" else "a"))
    assert not [path for path in found if path.name == "file"]
