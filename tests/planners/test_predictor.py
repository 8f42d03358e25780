"""Predicted speeds of placements: CPU layers, variants, and passes shared by sequences."""

from dataclasses import replace

import pytest

from offspec_planners.acceptance import typical
from offspec_planners.cost import Estimate, ModelSizes
from offspec_planners.cpu_work import fastest_cpu_layers
from offspec_planners.hardware_rates import preset
from offspec_planners.placement import Placement, Sizes, TooSmallError, cpu_layers, place_on_devices
from offspec_planners.plan.forecast import WhatIf
from offspec_planners.predictor import Predictor
from offspec_planners.search import SpeedForecast, best
from offspec_planners.shared_passes import LaidOut, SharedPasses
from offspec_planners.typical_acceptance import SELF_DRAFT
from offspec_planners.what_if import explain_memories, faster_rows, sequence_rows, undrafted_rows

GB = 10**9
LAYERS = 40
MODEL = ModelSizes("model", (GB,) * LAYERS, GB // 2, GB, GB // 2, 10**5, 32768, 8192, 32000)
PREDICTOR = Predictor(MODEL, Estimate(preset("rtx-4090"), None), typical(SELF_DRAFT), drafts=False)


def _place(vram: int, ram: int = 64 * GB, on_cpu: int = 0) -> Placement | None:
    sizes = Sizes(MODEL.layers, (0,) * LAYERS)
    try:
        return place_on_devices(sizes, [vram], ram, cpu=cpu_layers(LAYERS, on_cpu))
    except TooSmallError:
        return None


def _placed(vram: int) -> Placement:
    placement = _place(vram)
    assert placement is not None
    return placement


def _chosen(placement: Placement, predictor: Predictor = PREDICTOR) -> SpeedForecast:
    return best(predictor.sweep(predictor.costs(placement, 1.0), [predictor.sequences], [1]))


def test_cpu_computes_layers_that_would_stream() -> None:
    streamed, whole = _placed(20 * GB), _placed(50 * GB)
    chosen = _chosen(streamed)
    layers = fastest_cpu_layers(PREDICTOR, chosen, lambda count: _place(20 * GB, on_cpu=count))
    found = _place(20 * GB, on_cpu=layers)
    assert layers and found is not None
    assert PREDICTOR.pass_seconds(found, chosen) < PREDICTOR.pass_seconds(streamed, chosen)
    assert not fastest_cpu_layers(PREDICTOR, chosen, lambda count: whole), "nothing streams"
    assert not fastest_cpu_layers(PREDICTOR, chosen, lambda count: None), "nothing fits"
    assert not fastest_cpu_layers(PREDICTOR, chosen, lambda count: None if count else streamed)


def test_variants_that_make_no_difference_are_omitted() -> None:
    choice = _chosen(_placed(20 * GB)).choice
    sizes = [20, 21, 30, 30, 60]
    speeds = [PREDICTOR.best_speed(_placed(vram * GB), choice) for vram in sizes]
    ladder = [WhatIf(f"{vram} GB", speed, "") for vram, speed in zip(sizes, speeds, strict=True)]
    rows = faster_rows(choice, [ladder, ladder[-1:]])
    assert [row.change for row in rows] == ["30 GB", "60 GB", "60 GB"]
    speeds = [row.tok_per_s or 0.0 for row in rows]
    assert choice.tok_per_s < speeds[0] < speeds[1] == speeds[2]
    assert speeds[1] == pytest.approx(PREDICTOR.speed_without_draft(_placed(60 * GB)))


def test_memories_are_listed_in_a_clause() -> None:
    assert explain_memories(_placed(50 * GB), MODEL, vram=True) == "all layers in VRAM"
    split = _placed(20 * GB)
    kept = len(split.resident)
    assert explain_memories(split, MODEL, vram=True) == f"{kept} of 40 layers in VRAM, {40 - kept} in RAM"


def test_drafts_are_listed_only_if_about_as_fast() -> None:
    choice = _chosen(_placed(20 * GB)).choice
    rows = [undrafted_rows(choice, factor * choice.tok_per_s) for factor in (0.9, 0.99, 1.04, 1.1)]
    assert [len(found) for found in rows] == [1, 0, 0, 1]


def test_sequences_that_do_not_fit_have_no_row() -> None:
    predictor, placement = replace(PREDICTOR, sequences=2), _placed(20 * GB)
    chosen = _chosen(placement, predictor)

    def lay_out(sequences: int, budget: int, width: int) -> LaidOut | None:
        assert (budget, width) == (sequences, 1)
        return (placement, sequences) if sequences <= 8 else None

    passes = SharedPasses(predictor, chosen, (placement, 2), lay_out, (16, 16))
    rows = passes.rows()
    assert [(row.sequences, row.caches) for row in rows] == [(1, 1), (2, 2), (4, 4), (8, 8)]
    assert sorted(rows, key=lambda row: row.tok_per_s) == list(rows), "one read of the weights serves all"
    assert not replace(passes, predictor=PREDICTOR).rows()
    named = [row.change for row in sequence_rows(chosen.choice, 2, rows)]
    assert named == ["with 1 sequence", "with 4 sequences", "with 8 sequences"]
