"""Files for later runs: saved if possible, used only if intact."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offspec.core.errors import DiskFullError, PlanError
from offspec.plan import records
from offspec.plan.records import DraftRecord
from offspec_planners.acceptance import typical
from offspec_planners.typical_acceptance import MODEL
from tests.support.sample_plans import small


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _learned(temperature: float, coupled: bool, passes: int = 3) -> DraftRecord:
    record = DraftRecord("target", "draft")
    entry = record.entry(temperature, coupled)
    entry.forest = typical(MODEL).forest[:2]
    for _ in range(passes):
        entry.end_pass(4.0, 3)
    return record


def _only_file(folder: Path) -> Path:
    (file,) = folder.rglob("*.json")
    return file


# Possible contents where one of our files is expected; none is valid.
FOREIGN: dict[str, Callable[[str], bytes]] = {
    "cut off": lambda text: text.encode()[: len(text) // 2],
    "no text": lambda text: b"\xff\xfe\x00" + text.encode(),
    "a list": lambda text: b"[]",
    "another object": lambda text: b'{"name": "demo"}',
    "of the future": lambda text: (
        text.replace('"offspec_plan": 2', '"offspec_plan": 99')
        .replace('"version":1', '"version":99')
        .encode()
    ),
    "too deep": lambda text: b"[" * 100_000,
    "a number too long": lambda text: b'{"version": ' + b"1" * 5000 + b"}",
}


def test_plan_is_saved_under_its_key_and_renewed_if_damaged(cache: Path) -> None:
    assert records.load_plan("one") is None
    for kind in ("cut off", "no text", "of the future"):
        records.save_plan("one", small())
        assert records.load_plan("one") == small() and records.load_plan("two") is None
        file = _only_file(cache)
        assert records.read_plan(file) == small()
        file.write_bytes(FOREIGN[kind](file.read_text("utf-8")))
        assert records.load_plan("one") is None, kind
    file.unlink()
    file.mkdir()
    assert records.load_plan("one") is None
    records.save_plan("one", small())  # a folder cannot be replaced by a file


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files(change: Callable[[str], bytes], tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(change(small().to_text()))
    with pytest.raises(PlanError, match=r"mine\.json") as caught:
        records.read_plan(file)
    assert "\n" not in str(caught.value)
    _learned(0.0, True).save()
    file = _only_file(cache)
    file.write_bytes(change(file.read_text("utf-8")))
    record = DraftRecord("target", "draft")
    assert record.find(0.0, True) is None and record.nearest(0.0, True) is None
    _learned(0.0, True).save()
    assert DraftRecord("target", "draft").find(0.0, True) is not None


def test_errors_for_a_named_plan(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    for place, reason in ((file, "No such file"), (tmp_path, "directory")):
        with pytest.raises(PlanError, match=reason):
            records.read_plan(place)
    for key, value, reason in (
        ("offspec_plan", 3, "offspec_plan is 3; this version of offspec reads up to 2"),
        ("offspec_plan", 1, "offspec_plan is 1, of an earlier offspec; make one"),
        ("budget", "many", 'budget is "many"; it should be a whole number'),
        ("draft_mode", "fuller", "draft_mode"),
        ("draft_bits", 16, "draft_bits is 16; it should be 2, 3 or 4, since the draft is packed"),
        ("draft_mode", "none", 'draft_bits is 4; it should be 16, since draft_mode is "none"'),
    ):
        file.write_text(json.dumps(small().to_json() | {key: value}))
        with pytest.raises(PlanError, match=reason):
            records.read_plan(file)
    file.write_text('{"version": 1, "profiles": {}}')  # one of our files, but of another kind
    with pytest.raises(PlanError, match="not a plan"):
        records.read_plan(file)


def test_keys_differ_between_cases() -> None:
    cases = [("a", "b"), ("a", None), ("ab",), ("a", "b", 1), ("a", "b", 1.5), ("b", "a")]
    keys = [records.key_of(*case) for case in cases]
    assert len(set(keys)) == len(cases) and keys == [records.key_of(*case) for case in cases]
    assert all(key.isalnum() for key in keys)


def test_saved_calibrations_are_found_again(cache: Path) -> None:
    DraftRecord("target", "draft").save()
    assert not list(cache.rglob("*.json")), "nothing learnt leaves no file"
    record = _learned(0.6, coupled=True)
    record.entry(0.6, True).fit.observations = 17
    record.save()
    again = DraftRecord("target", "draft")
    found = again.find(0.6, True)
    assert found is not None and found.to_json() == record.entry(0.6, True).to_json()
    assert (found.passes, found.fit.observations, len(found.forest)) == (3, 17, 2)
    assert again.entry(0.6, True) is found
    others = ("target", "other"), ("other", "draft"), ("target", "draft", 4), ("target", "draft", 3)
    for other in (DraftRecord(*names) for names in others):
        assert other.find(0.6, True) is None


def test_entries_are_separate_by_temperature_and_rule() -> None:
    record = _learned(0.6, coupled=True)
    assert record.find(0.6, False) is None and record.find(0.7, True) is None
    assert record.find(0.601, True) is record.find(0.6, True), "to two digits"
    assert record.entry(0.0, True) is record.entry(0.0, False), "greedy decoding knows no rule"


def test_the_nearest_temperature_of_the_same_rule() -> None:
    record = _learned(0.9, coupled=True)
    coupled = record.find(0.9, True)
    assert record.nearest(0.6, True) is coupled, "known at another temperature"
    assert record.nearest(0.6, False) is None, "plain decoding accepts otherwise"
    greedy = record.entry(0.0, True)
    assert record.nearest(0.1, True) is coupled, "an entry without a pass knows nothing"
    greedy.end_pass(3.0, 3)
    assert record.nearest(0.1, True) is greedy and record.nearest(0.1, False) is greedy
    assert record.nearest(0.8, True) is coupled
    plain = record.entry(0.5, False)
    plain.end_pass(3.0, 3)
    assert record.nearest(0.6, False) is plain and record.nearest(0.6, True) is coupled


@pytest.mark.parametrize("name", ["", "warm alone", "nan alone", "-1 alone", "0", "0 both", "0 alone 0"])
def test_entry_with_a_foreign_name_is_ignored(name: str, cache: Path) -> None:
    _learned(0.0, True).save()
    file = _only_file(cache)
    found = json.loads(file.read_text())
    entry = found["entries"].pop("0 alone")
    file.write_text(json.dumps(found | {"entries": {name: entry}}))
    record = DraftRecord("target", "draft")
    assert record.nearest(0.0, True) is None and record.nearest(0.7, True) is None


def test_one_damaged_entry_keeps_the_others(cache: Path) -> None:
    record = _learned(0.0, True)
    record.entry(1.0, True).end_pass(2.0, 2)
    record.save()
    file = _only_file(cache)
    damages: list[Any] = [None, [], {}, {"passes": -1}, "text"]
    for damage in damages:
        found = json.loads(file.read_text())
        found["entries"]["1 coupled"] = damage
        file.write_text(json.dumps(found))
        again = DraftRecord("target", "draft")
        assert again.find(0.0, True) is not None and again.find(1.0, True) is None


@pytest.mark.parametrize("why", ["no folder", "no folders in it", "a full disk"])
def test_read_only_cache_is_ignored_silently(why: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise DiskFullError("the disk filled up")

    if why == "no folder":
        cache.write_text("a file where a folder should be")
    elif why == "no folders in it":
        cache.mkdir()
        (cache / "plans").write_text("")
        (cache / "drafts").write_text("")
    else:
        monkeypatch.setattr(records, "write_atomic", full)
    records.save_plan("one", small())
    assert records.load_plan("one") is None
    _learned(0.0, True).save()
    assert DraftRecord("target", "draft").find(0.0, True) is None
