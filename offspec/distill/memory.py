"""What fits in memory: questions answered together, and rows learned from together."""

from offspec.core import memory
from offspec.core.errors import CapacityError
from offspec.distill.embed_head import Ends
from offspec.distill.generate_batch import PIECE
from offspec.distill.student import Pupil
from offspec.model.loaded import LoadedModel
from offspec_planners.units import format_bytes

_BATCHES = (128, 64, 32, 16, 8, 4, 2, 1)
_ROWS = (256, 128, 64)
_SHARE = 4  # one part in this many of memory is for sequences that are generated side by side
_WEIGHT = 16  # bytes of a weight in training: itself, its gradient, two averages
_COPIES = 5  # of a row's logits, for each depth, on the way forth and back; and for the target's own


def questions_together(target: LoadedModel, longest: int, given: int) -> tuple[int, int]:
    """How many texts of at most `longest` tokens are written side by side, and the bytes they take.

    given: bytes of memory in all.
    """
    config, item = target.skeleton.config, target.dtype.itemsize
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    kept = longest * (2 * target.cache_bytes(1) + hidden * item)  # a cache is copied when sequences end
    each = kept + PIECE * (16 * hidden * item + 8 * heads * longest) + 12 * target.skeleton.vocab_size
    count = next((count for count in _BATCHES if count * each <= given // _SHARE), 1)
    return count, count * each


def rows_together(pupil: Pupil, ends: Ends, given: int | None) -> int:
    """Rows of a lesson, such that training stays within `given` bytes; None: of a machine with enough.

    Raises CapacityError where even the shortest lesson takes more.
    """
    if given is None:
        return _ROWS[0]
    for rows in _ROWS:
        needed = memory.resident_bytes() + _training_bytes(pupil, ends, rows)
        if needed <= given:
            return rows
    raise _too_little(needed, given, "raise `memory`; the text is kept")


def check_training(pupil: Pupil, ends: Ends, given: int) -> None:
    """Raise CapacityError where even the shortest lesson takes more than `given` bytes, before there is text.

    pupil and ends: without values; what the process has now stays.
    """
    needed = memory.resident_bytes() + ends.nbytes + _training_bytes(pupil, ends, _ROWS[-1])
    if needed > given:
        raise _too_little(needed, given, "raise `memory`, or train medusa heads of a small depth")


def _training_bytes(pupil: Pupil, ends: Ends, rows: int) -> int:
    weights = sum(weight.numel() for weight in pupil.module.parameters())
    return _WEIGHT * weights + rows * _COPIES * (pupil.depth + 1) * 4 * len(ends.common)


def _too_little(needed: int, given: int, fix: str) -> CapacityError:
    sizes = f"{format_bytes(needed)} of memory, and {format_bytes(given)} are allowed"
    return CapacityError(
        f"training the head needs {sizes}: {fix}",
        needed=needed,
        given=given,
    )
