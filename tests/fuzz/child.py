"""A process that tries cases one after the other: a number comes on stdin, and a line of JSON goes back.

python -m tests.fuzz.child BASES SEED
"""

import json
import os
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from random import Random

from offspec.core.errors import OffspecError
from offspec.core.memory import resident_bytes
from tests.fuzz.mutate import mutate
from tests.fuzz.surfaces import SURFACES, Surface

ROOM = 2 << 30  # bytes of addresses that a case may take beside what the process has when it begins


def make_case(number: int, seed: int, bases: Path, room: Path) -> tuple[str, Surface, Path]:
    """The name of a case's surface, the surface, and its copy of the files with one of them changed."""
    names = list(SURFACES)
    name = names[number % len(names)]
    surface, random = SURFACES[name], Random(f"{seed} {number}")
    source, copy = bases / surface.base, room / surface.base
    if source.is_dir():
        shutil.copytree(source, copy)
    else:
        shutil.copyfile(source, copy)
    file = copy / random.choice(surface.files) if source.is_dir() else copy
    file.write_bytes(mutate(random, file.read_bytes()))
    surface.mend(copy)
    return name, surface, copy


def outcome(number: int, seed: int, bases: Path) -> dict[str, str]:
    """What became of a case: read, refused by an error of offspec, or failed with a traceback."""
    with tempfile.TemporaryDirectory(prefix="offspec-fuzz-") as room:
        name, surface, copy = make_case(number, seed, bases, Path(room))
        os.environ["OFFSPEC_CACHE"] = os.path.join(room, "cache")
        try:
            surface.use(copy)
        except OffspecError as error:
            lines = str(error).splitlines()
            if len(lines) != 1:
                return {"surface": name, "end": "failed", "why": f"not one line: {error!r}"}
            return {"surface": name, "end": "refused", "why": lines[0][:300]}
        except Exception:
            return {"surface": name, "end": "failed", "why": traceback.format_exc()}
        except BaseException as error:  # a panic of Rust is no Exception
            return {"surface": name, "end": "failed", "why": f"{error!r}\n{traceback.format_exc()}"}
    return {"surface": name, "end": "read", "why": ""}


def _limit() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))


def main() -> None:
    bases, seed = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for surface in SURFACES.values():  # what is whole is read, and everything is imported
        surface.use(bases / surface.base)
    _limit()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        before = resident_bytes()
        found = outcome(int(line), seed, bases)
        grown = resident_bytes() - before
        print(json.dumps({**found, "grown": grown}), file=answers, flush=True)


if __name__ == "__main__":
    main()
