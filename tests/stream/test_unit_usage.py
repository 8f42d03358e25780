"""Eviction from a store whose groups request units in turn."""

import numpy as np

from offspec.stream.unit_usage import UnitUsage

GROUPS, EACH = 6, 8


def _hit_rate(usage: UnitUsage, slots: int, asked: int, passes: int = 60) -> float:
    """Hit rate of a plain cache in which each group in turn requests some units, the first more often."""
    generator, kept, hits = np.random.default_rng(3), list[int](), 0
    weights = 1 / np.arange(1, EACH + 1)
    for _ in range(passes):
        for group in range(GROUPS):
            chosen = generator.choice(EACH, asked, replace=False, p=weights / weights.sum())
            units = [group * EACH + int(unit) for unit in chosen]
            hits += sum(unit in kept for unit in units)
            usage.note(units, [1] * asked, 1)
            missed = [unit for unit in units if unit not in kept]
            more = len(kept) + len(missed) - slots
            gone = usage.needed_latest([unit for unit in kept if unit not in units], more) if more > 0 else []
            kept = [unit for unit in kept if unit not in gone] + missed
    return hits / (passes * GROUPS * asked)


def test_pass_larger_than_the_cache_still_has_hits() -> None:
    """With LRU eviction it would never find any."""
    for slots in (12, 16, 20):
        found = _hit_rate(UnitUsage([unit // EACH for unit in range(GROUPS * EACH)]), slots, 4)
        assert found > 1.15 * slots / (GROUPS * EACH), "more than by chance"


def test_evicted_unit_is_needed_latest() -> None:
    usage = UnitUsage([unit // EACH for unit in range(GROUPS * EACH)])
    generator = np.random.default_rng(1)
    shares = np.full(GROUPS * EACH, 0.1)
    for turn in range(50):
        group, rows = turn % GROUPS, int(generator.integers(1, 40))
        counts = generator.integers(1, rows + 1, 3)
        units = [group * EACH + int(unit) for unit in generator.choice(EACH, 3, replace=False)]
        usage.note(units, counts.tolist(), rows)
        for unit in range(group * EACH, (group + 1) * EACH):
            seen = counts[units.index(unit)] / rows if unit in units else 0.0
            shares[unit] = (shares[unit] * 32 + seen * rows) / (rows + 32)
        np.testing.assert_allclose(usage.shares, shares, rtol=1e-4)

        def needed(unit: int, group: int = group, rows: int = rows) -> float:
            asked = 1 - (1 - shares[unit]) ** rows
            return float((unit // EACH - group) % GROUPS / GROUPS + 1 / max(asked, 1e-4))

        kept = [int(unit) for unit in generator.choice(GROUPS * EACH, 20, replace=False)]
        leaving = [needed(unit) for unit in usage.needed_latest(kept, 5)]
        expected = sorted(map(needed, kept), reverse=True)[:5]
        np.testing.assert_allclose(leaving, expected, rtol=1e-3)
