"""Results of a batch as a Parquet file."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offspec.core.errors import RequestError, missing_package
from offspec.core.files import new_file, reading


def check_installed() -> None:
    """Raises RequestError where no Parquet file could be written."""
    if find_spec("pyarrow") is None:
        raise RequestError(f"{missing_package('pyarrow', 'ray')}; or name a .jsonl file")


def write_parquet(results: Path, out: Path) -> None:
    """Write what a file of results has, a column for each field. Objects and lists become JSON as text.

    results: of `ResultFile`. out: replaced whole where there is one.

    Raises:
        CheckpointError: The results cannot be read.
        DiskFullError: There is no room.
    """
    import pyarrow
    from pyarrow import parquet

    with reading(results), results.open("rb") as lines:
        rows = [json.loads(line) for line in lines]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_cell(row.get(name)) for row in rows] for name in names}
    with new_file(out) as fd, open(fd, "wb", closefd=False) as file:
        parquet.write_table(pyarrow.table(columns), file)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
