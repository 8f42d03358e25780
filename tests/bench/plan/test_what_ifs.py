"""What-ifs of plans are done as they are told, where they can be."""

import pytest

from bench.plan.cases import Target
from bench.plan.what_ifs import Trial, trial_of


@pytest.mark.parametrize(
    ("change", "note", "trial"),
    [
        ("no draft", "one token a pass", Trial(("--draft", "none"))),
        ("3 GB of RAM", "all layers in RAM", Trial(memory=3_000_000_000)),
        ("the target packed to nf4", "`--quantize nf4`, slightly", Trial(("--quantize", "nf4"))),
        ("keys and values in int8", "`--kv-cache int8`, all", Trial(("--kv-cache", "int8"))),
        ("a link twice as fast", "the disk", None),
        ("with 4 sequences", "in all", None),
    ],
)
def test_a_what_if_is_done_by_its_options(change: str, note: str, trial: Trial | None) -> None:
    assert trial_of({"change": change, "note": note, "tok_per_s": 1.0}) == trial


def test_other_options_take_the_place_of_the_usual_ones() -> None:
    small = Target("model", "draft", 512)
    assert small.words(("--draft", "none")) == ["model", "--draft", "none", "--context", "512"]
    assert small.words(("--draft-bits", "4")).count("--draft-bits") == 1
