"""Names of models on the Hugging Face Hub, as typed or as copied from a browser."""

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)"
_ID = re.compile(rf"{_REPOSITORY}(?:@(?P<revision>[\w./-]+))?(?::(?P<gguf>[\w.-][\w./-]*))?", re.ASCII)
_PAGE = re.compile(
    rf"{_REPOSITORY}/(?:tree|blob|resolve|raw)/(?P<revision>[^/]+)(?:/(?P<gguf>.+))?", re.ASCII
)
FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub.

    Args:
        repository: `organization/name`.
        revision: A branch, tag or commit. None: the main branch.
        gguf: A GGUF model of the repository: its quantization, such as "Q4_K_M", or its file. "": the
            safetensors model, or the only GGUF model.
    """

    repository: str
    revision: str | None = None
    gguf: str = ""


def hub_name(model: str) -> HubName | None:
    """Parse the name of a hub model; None for anything else. Makes no request to the hub.

    Args:
        model: `org/name`, `org/name@revision`, `org/name:Q4_K_M`, each optionally after `hf.co/`, or the
            address of a model's page or of a GGUF file.
    """
    rest = _after_host(model)
    if rest is None:
        found = _ID.fullmatch(model)
        is_file = model.endswith(FILE_ENDINGS) and ":" not in model
        return None if found is None or is_file else _named(found)
    rest = re.split(r"[?#]", rest, maxsplit=1)[0].rstrip("/")
    found = _ID.fullmatch(rest) or _PAGE.fullmatch(rest)
    if found is None or (found["gguf"] or "").endswith(FILE_ENDINGS[1:]):
        return None
    return _named(found)


def is_address(model: str) -> bool:
    """Return whether a name is a web address, or a hub address without its scheme."""
    return "://" in model or _after_host(model) is not None


def _named(found: re.Match[str]) -> HubName:
    revision = unquote(found["revision"] or "main")
    return HubName(
        found["repository"], None if revision == "main" else revision, unquote(found["gguf"] or "")
    )


def _after_host(model: str) -> str | None:
    """Return the part of a hub address after the host; None for anything else."""
    scheme, separator, rest = model.partition("://")
    if separator and scheme.lower() == "hf":
        return rest
    if separator and scheme.lower() not in ("http", "https"):
        return None
    host, _, path = (rest if separator else model).partition("/")
    mirror = os.environ.get("HF_ENDPOINT", "").partition("://")[2].rstrip("/")
    return path if host.lower() in (*_HOSTS, *filter(None, [mirror.lower()])) else None
