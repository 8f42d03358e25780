"""Names of hub models as people type or copy them, and which GGUF file of a repository each selects."""

import pytest

from offspec.checkpoint.hub_gguf import choose_gguf, gguf_models
from offspec.checkpoint.hub_name import HubName, hub_name
from offspec.core.errors import ModelNotFoundError

NAME = "org/Model-8B-GGUF"
Q4 = "Model-8B-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (NAME, HubName(NAME)),
        (f"{NAME}@v1.0", HubName(NAME, "v1.0")),
        (f"{NAME}@refs/pr/1", HubName(NAME, "refs/pr/1")),
        (f"{NAME}:Q4_K_M", HubName(NAME, None, "Q4_K_M")),
        (f"{NAME}@v1:Q4_K_M", HubName(NAME, "v1", "Q4_K_M")),
        (f"{NAME}:{Q4}", HubName(NAME, None, Q4)),
        (f"hf.co/{NAME}:Q4_K_M", HubName(NAME, None, "Q4_K_M")),
        (f"HuggingFace.co/{NAME}", HubName(NAME)),
        (f"hf://{NAME}", HubName(NAME)),
        (f"https://www.huggingface.co/{NAME}/", HubName(NAME)),
        (f"https://huggingface.co/{NAME}?library=transformers#usage", HubName(NAME)),
        (f"https://hf.co/{NAME}/tree/v1.0", HubName(NAME, "v1.0")),
        (f"https://huggingface.co/{NAME}/tree/refs%2Fpr%2F1", HubName(NAME, "refs/pr/1")),
        (f"https://huggingface.co/{NAME}/resolve/main/{Q4}?download=true", HubName(NAME, None, Q4)),
        (f"https://huggingface.co/{NAME}/blob/main/big/{Q4}", HubName(NAME, None, f"big/{Q4}")),
        (f"https://mirror.example/{NAME}", HubName(NAME)),
        (f"https://huggingface.co/{NAME}/resolve/main/model.safetensors", None),
        (f"https://example.com/{NAME}", None),
        (f"https://huggingface.co/datasets/{NAME}", None),
        (f"ftp://huggingface.co/{NAME}", None),
        ("https://huggingface.co/gpt2", None),
        ("llama3.3:70b", None),
        ("./org", None),
        (f"{NAME}:", None),
        ("", None),
    ],
)
def test_parse_names(monkeypatch: pytest.MonkeyPatch, typed: str, meant: HubName | None) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert hub_name(typed) == meant


FILES = {
    "README.md": 1_000,
    "mmproj-F16.gguf": 800_000_000,
    "imatrix.gguf": 5_000_000,
    "Model-8B-Q2_K.gguf": 3_200_000_000,
    Q4: 4_900_000_000,
    "Model-8B-UD-Q4_K_XL.gguf": 5_100_000_000,
    "Model-8B-UD-Q2_K.gguf": 3_300_000_000,
    "model-8b-iq3_xs.gguf": 3_500_000_000,
    "Q8_0/Model-8B-Q8_0-00001-of-00002.gguf": 5_000_000_000,
    "Q8_0/Model-8B-Q8_0-00002-of-00002.gguf": 3_500_000_000,
}


PARTS = [f"Q8_0/Model-8B-Q8_0-0000{n}-of-00002.gguf" for n in (1, 2)]


@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        ("Q4_K_M", [Q4]),
        ("Q4_K_XL", ["Model-8B-UD-Q4_K_XL.gguf"]),
        ("q2_k", ["Model-8B-Q2_K.gguf"]),
        ("IQ3_XS", ["model-8b-iq3_xs.gguf"]),
        (Q4, [Q4]),
        ("Model-8B-Q4_K_M", [Q4]),
        ("Q8_0", PARTS),
        (PARTS[1], PARTS),
    ],
)
def test_word_selects_a_model_with_all_parts(wanted: str, files: list[str]) -> None:
    assert choose_gguf(gguf_models(FILES), wanted, NAME).files == tuple(files)


def test_choices_are_listed_with_their_sizes_and_each_listed_word_selects_one() -> None:
    models = gguf_models(FILES)
    with pytest.raises(ModelNotFoundError) as caught:
        choose_gguf(models, "", NAME)
    assert str(caught.value) == (
        f"{NAME} has 6 GGUF models: name one, as in {NAME}:Q2_K, of Q2_K (3.20 GB), UD-Q2_K (3.30 GB), "
        "iq3_xs (3.50 GB), Q4_K_M (4.90 GB), UD-Q4_K_XL (5.10 GB), Q8_0 (8.50 GB)"
    )
    with pytest.raises(ModelNotFoundError, match=r"has no GGUF model Q5_K_M: it has Q2_K \(3.20 GB\), UD-"):
        choose_gguf(models, "Q5_K_M", NAME)


def test_models_of_one_quantization_are_distinguished_by_their_files() -> None:
    models = gguf_models({"small-Q4_0.gguf": 1, "large-Q4_0.gguf": 2, "large-Q8_0.gguf": 3})
    with pytest.raises(
        ModelNotFoundError, match=r"2 GGUF models: .* of small-Q4_0 \(1 B\), large-Q4_0 \(2 B\)$"
    ):
        choose_gguf(models, "Q4_0", NAME)
    assert choose_gguf(models, "small-Q4_0", NAME).files == ("small-Q4_0.gguf",)


def test_single_model_needs_no_word() -> None:
    assert choose_gguf(gguf_models({"any.gguf": 9, "mmproj.gguf": 1}), "", NAME).files == ("any.gguf",)
    with pytest.raises(ModelNotFoundError, match="has no GGUF files: leave out :Q4_K_M"):
        choose_gguf([], "Q4_K_M", NAME)
