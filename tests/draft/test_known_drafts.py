"""Published drafts of well-known targets: found by name, in any spelling, or by shape."""

from typing import Any

import pytest

from offspec.checkpoint.known_models import known_config
from offspec.draft.known_drafts import _HEADS, _SIBLINGS, KnownDraft, known_drafts

LARGE = "meta-llama/Llama-3.3-70B-Instruct"
HEAD = "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B"
MIDDLE, SMALL = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"


def ids(target: str, config: dict[str, Any] | None = None, trained: bool | None = None) -> list[str]:
    found = known_drafts(target, config)
    return [draft.id for draft in found if trained is None or draft.trained == trained]


def shape(name: str, **changes: Any) -> dict[str, Any]:
    config = known_config(name)
    assert config is not None
    return {**config, **changes}


@pytest.mark.parametrize(
    "name",
    [
        LARGE,
        "somewhere/models/llama-3.3-70b-instruct/",
        "Llama-3.3-70B-Instruct-Q4_K_M.gguf",
        "someone/Meta-Llama-3.3-70B-Instruct-AWQ-INT4",
    ],
)
def test_spellings_of_a_model_name(name: str) -> None:
    found = known_drafts(name)
    assert found[0] == KnownDraft(HEAD, "eagle3", "one layer over states of three of the target's", LARGE)
    assert ids(name, trained=False) == [MIDDLE, SMALL], "the largest first"


@pytest.mark.parametrize(
    ("target", "best", "kind"),
    [
        ("lmsys/vicuna-7b-v1.3", "yuhuili/EAGLE-Vicuna-7B-v1.3", "eagle"),
        ("meta-llama/Llama-3.1-70B-Instruct", "ibm-ai-platform/llama3-70b-accelerator", "mlp_speculator"),
        ("Qwen/Qwen3-30B-A3B", "AngelSlim/Qwen3-a3B_eagle3", "eagle3"),
        (
            "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8",
            "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",
            "eagle3",
        ),
        ("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "model"),
    ],
)
def test_best_draft_of_each_target(target: str, best: str, kind: str) -> None:
    first = known_drafts(target)[0]
    assert (first.id, first.kind) == (best, kind)


def test_drafts_of_the_same_family_are_smaller() -> None:
    assert ids("Qwen/Qwen3-8B", trained=False) == ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"]
    assert ids("meta-llama/Llama-3.2-3B-Instruct", trained=False) == [SMALL]
    assert ids(SMALL) == ids("Qwen/Qwen3-0.6B") == []
    assert ids("meta-llama/Llama-2-7b-chat-hf", trained=False) == ["TinyLlama/TinyLlama-1.1B-Chat-v1.0"]
    assert ids("Qwen/Qwen3-30B-A3B", trained=False)[0] == "Qwen/Qwen3-8B", "30, not 3"


def test_similar_names_do_not_match() -> None:
    assert ids("Qwen/Qwen3.5-27B") == ids("gpt-oss-200b") == ids("someone/a-model") == ids("") == []
    assert HEAD not in ids("meta-llama/Llama-3.1-70B-Instruct")
    assert ids("huggyllama/llama-30b") == [], "a number that only begins alike"
    assert ids("meta-llama/Meta-Llama-3-70B", trained=False) == [MIDDLE, SMALL]
    # Heads do not fit a fine-tuned model; its vocabulary is the same.
    for name in ("8B-Base", "4B-Instruct-2507", "30B-A3B-Thinking-2507", "14B-VL"):
        target = f"Qwen/Qwen3-{name}"
        assert ids(target, trained=True) == [] and ids(target, trained=False), target


def test_folder_is_recognized_by_its_configuration() -> None:
    assert HEAD in ids("a/folder", {"_name_or_path": LARGE})
    found = known_drafts("a/folder", shape(LARGE))
    assert HEAD in [draft.id for draft in found] and found[0].trained and not found[-1].trained
    assert len(found) == len({draft.id for draft in found}), "each is named once"
    assert "yuhuili/EAGLE-LLaMA3-Instruct-70B" not in ids("a/folder", shape(LARGE)), "its context is shorter"
    assert ids("a/folder", shape(LARGE, num_hidden_layers=79)) == []
    assert ids("a/folder", {"hidden_size": 8192}) == []


def test_mtp_modules_of_the_target() -> None:
    found = known_drafts("deepseek-ai/DeepSeek-V3", {"num_nextn_predict_layers": 1})
    assert [(draft.id, draft.kind) for draft in found] == [("mtp", "mtp")]
    for none in (0, -1, None, "x"):
        assert known_drafts("deepseek-ai/DeepSeek-V3", {"num_nextn_predict_layers": none}) == ()


def test_every_entry_is_a_hub_id() -> None:
    heads_of = dict[str, list[str]]()
    for published in _HEADS.values():
        for target, some in published.items():
            heads_of.setdefault(target, []).extend(some)
    names = [*heads_of, *(head for heads in heads_of.values() for head in heads)]
    names += [sibling for siblings in _SIBLINGS.values() for sibling in siblings]
    assert all(name.count("/") == 1 and not name.endswith("/") for name in names)
    for target, heads in heads_of.items():
        found = known_drafts(target)
        assert [draft.id for draft in found if draft.trained] == heads, target
        kinds = [draft.kind for draft in found]
        assert kinds == sorted(kinds, key=["eagle3", "eagle", "medusa", "mlp_speculator", "model"].index)
    (draft,) = known_drafts("demo-wide")
    assert (draft.id, draft.kind) == ("demo", "model")
