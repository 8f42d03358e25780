"""A model, or a head to draft with, from the Hugging Face hub, kept in the hub's own cache.

Files come one after the other (each one in parallel chunks where the hub offers that), so that an
interrupt stops at once and progress is a plain sum; `snapshot_download` waits for its threads and names the
revision before its files are there. What a run has finished, the next one does not fetch again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offspec.checkpoint.folder import CONFIG, INDEX, TEXT_FILES, choose_weights, open_folder
from offspec.checkpoint.gguf.parts import read_model
from offspec.checkpoint.hub_gguf import choose_gguf, gguf_models
from offspec.checkpoint.hub_name import HubName
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.quantised import check_method
from offspec.checkpoint.ranges import one_line
from offspec.core.errors import CheckpointError, ModelNotFoundError, OffspecError, UnsupportedModelError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.core.files import disk_full, require_space

_PATIENCE = 20.0  # seconds to wait for the hub's first answer
_GLANCE = 3.0  # seconds to wait for any answer, before something is fetched that can be done without

# From the names of a repository's files, and a reader of those that are JSON, to the files that are wanted.
Choose = Callable[[Collection[str], Callable[[str], dict[str, Any]]], Sequence[str]]


def download(name: HubName, notify: Callable[[Event], None]) -> Path:
    """Download a hub model, or what is missing of it.

    Without a network, or with HF_HUB_OFFLINE, the cached copy is used if it is complete.

    Returns:
        The folder of its safetensors, configuration and tokenizer, or its GGUF file, the first if there are
        several parts.

    Raises:
        ModelNotFoundError: A wrong id or revision, a model that needs permission, or no GGUF model of that
            name; also a repository with several, if none was named.
        CheckpointError: The repository has no weights that can be read, or the download stopped.
        DiskFullError: There is too little room.
    """
    source = _asked(name.repository, name.revision, notify)
    if isinstance(source, _Copy):
        path = source.model(name.gguf)
        source.tell(notify)
        return path
    with _explained(name.repository, name.revision):
        return source.model(name.gguf, name.revision)


def download_head(
    repository: str, revision: str | None, notify: Callable[[Event], None], choose: Choose
) -> Path | None:
    """The folder of a hub repository's config.json and the files that `choose` takes, pickles perhaps.

    None where it takes none: then nothing is fetched but what it has read. Raises as `download` does.
    """
    source = _asked(repository, revision, notify)
    if isinstance(source, _Copy):
        folder = source.folder()
        names = {file.name for file in folder.iterdir()}
        wanted = choose(names, lambda name: read_json(folder / name))
        if not all((folder / name).exists() for name in wanted):
            raise source.not_whole()
        if wanted:
            source.tell(notify)
        return folder if wanted else None
    with _explained(repository, revision):
        return source.head(choose, revision)


def _asked(repository: str, revision: str | None, notify: Callable[[Event], None]) -> _Fetch | _Copy:
    """What the hub says of a repository, or the copy in the cache where it does not answer."""
    import huggingface_hub as hub

    api = hub.HfApi(library_name="offspec")
    try:
        info = api.model_info(repository, revision=revision, files_metadata=True, timeout=_PATIENCE)
    except Exception as error:  # the network fails in many shapes
        if refused := _refusal(error, repository, revision):
            raise refused from error
        return _Copy(repository, revision, error)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Fetch(repository, str(info.sha), sizes, notify)


class _Copy:
    """A repository's copy in the hub's own cache; error: why the hub cannot be asked."""

    def __init__(self, repository: str, revision: str | None, error: Exception) -> None:
        from huggingface_hub import constants, errors

        self._repository, self._revision = repository, revision
        self._offline = isinstance(error, errors.OfflineModeIsEnabled)
        self._unreached = f"{constants.ENDPOINT} cannot be reached"
        self._why = "HF_HUB_OFFLINE is set" if self._offline else f"{self._unreached} ({one_line(error)})"

    def folder(self) -> Path:
        """Where it is, whole or not. Raises ModelNotFoundError where there is none."""
        import huggingface_hub as hub

        try:
            found = hub.snapshot_download(
                self._repository, revision=self._revision, local_files_only=True, allow_patterns=[CONFIG]
            )
        except (OSError, ValueError) as missing:
            raise self._error(f"the hub's cache has no copy of {self._repository}") from missing
        return Path(found)

    def model(self, gguf: str) -> Path:
        """The model's folder or GGUF file. Raises ModelNotFoundError where it is not here, or not whole."""
        folder = self.folder()
        sizes = {
            file.relative_to(folder).as_posix(): file.stat().st_size
            for file in folder.rglob("*")
            if file.is_file()
        }
        try:
            if not _is_gguf(sizes, gguf):
                open_folder(folder)
                return folder
            path = folder / self._chosen(sizes, gguf)
            read_model(path)
            return path
        except (UnsupportedModelError, ModelNotFoundError):
            raise
        except CheckpointError as damage:
            raise self.not_whole() from damage

    def _chosen(self, sizes: dict[str, int], gguf: str) -> str:
        models = gguf_models(sizes)
        if not models:
            raise self._error(f"the hub's cache has no copy of {self._repository}:{gguf}")
        try:
            return choose_gguf(models, gguf, self._repository).files[0]
        except ModelNotFoundError as error:
            raise ModelNotFoundError(f"{self._why}, and in the hub's cache {error}") from error

    def not_whole(self) -> ModelNotFoundError:
        """The error for a copy that lacks a file, or has a damaged one."""
        return self._error(f"the copy of {self._repository} in the hub's cache is not whole")

    def tell(self, notify: Callable[[Event], None]) -> None:
        """Say that the copy is used, unless that was asked for."""
        if not self._offline:
            notify(Notice(f"{self._unreached}: {self._repository} is taken from the hub's cache"))

    def _error(self, what: str) -> ModelNotFoundError:
        again = "connect to the network and run the command again"
        fix = "unset it for the download" if self._offline else again
        return ModelNotFoundError(f"{self._why}, and {what}: {fix}")


class _Fetch:
    """Downloads files of one commit, whose sizes are known, and counts their bytes."""

    def __init__(
        self, repository: str, commit: str, sizes: dict[str, int], notify: Callable[[Event], None]
    ) -> None:
        self._repository, self._commit, self._sizes, self._notify = repository, commit, sizes, notify
        self._top = {name: size for name, size in sizes.items() if "/" not in name}
        self._done = self._total = self._sent = 0

    def model(self, gguf: str, revision: str | None) -> Path:
        """Fetch what the model needs; the folder it is in, or the first of its GGUF files."""
        if _is_gguf(self._sizes, gguf):
            files = choose_gguf(gguf_models(self._sizes), gguf, self._repository).files
            return self._all((), files, files[0], revision)
        place = f"the hub repository {self._repository}"
        weights, _ = choose_weights(self._top, lambda: self._json(INDEX), place)
        if CONFIG not in self._top:
            raise CheckpointError(f"{place} is not a model that transformers can load: it has no {CONFIG}")
        texts = [name for name in self._top if name.endswith(TEXT_FILES)]
        return self._all(texts, weights, CONFIG, revision).parent

    def head(self, choose: Choose, revision: str | None) -> Path | None:
        """Fetch config.json and the files that are chosen; the folder they are in, None where none are."""
        weights = choose(self._top, self._json)
        return self._all([CONFIG], weights, CONFIG, revision).parent if weights else None

    def _all(self, texts: Sequence[str], weights: Sequence[str], first: str, revision: str | None) -> Path:
        """Fetch files of which the cache has none or a part. Returns the path of `first`."""
        if missing := [name for name in weights if name not in self._sizes]:
            raise CheckpointError(
                f"the hub repository {self._repository} lacks {missing[0]}, a part of the model: "
                "choose another revision"
            )
        new = {name: self._sizes[name] for name in [*texts, *weights] if not self._is_cached(name)}
        require_space(_hub_cache(), sum(new.values()), f"downloading {self._repository}", "HF_HOME")
        self._total = sum(new.values())
        for name in [*texts, *weights]:
            path = self._file(name, new.get(name, 0))
            if name == CONFIG:  # which comes before the weights
                check_method(read_json(path))
        # Only now does the revision's name point to this commit in the cache: offline it is whole or absent.
        return self._file(first, 0, revision or "main")

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self._file(name, 0))

    def _is_cached(self, name: str) -> bool:
        import huggingface_hub as hub

        return isinstance(hub.try_to_load_from_cache(self._repository, name, revision=self._commit), str)

    def _file(self, name: str, size: int, revision: str | None = None) -> Path:
        import huggingface_hub as hub

        class Bar(_Bar):
            add = staticmethod(self._add)

        before = self._done
        path = hub.hf_hub_download(
            self._repository,
            name,
            revision=revision or self._commit,
            library_name="offspec",
            tqdm_class=Bar,
        )
        self._add(before + size - self._done)  # files that came without a bar
        return Path(path)

    def _add(self, count: int) -> None:
        self._done += count
        share = 100 * self._done // max(1, self._total)
        if share != self._sent and self._total:
            self._sent = share
            self._notify(LoadProgress(f"downloading {self._repository}", self._done, self._total, "bytes"))


class _Bar:
    """As much of a tqdm bar as the hub's client uses. `update` counts the bytes that reached the disk."""

    add: Callable[[int], None]

    def __init__(self, *_: Any, initial: float = 0, total: float | None = None, **__: Any) -> None:
        self.n = 0
        self.total = total
        self.update(initial)

    def update(self, count: float | None = 1) -> None:
        self.n += int(count or 0)
        self.add(int(count or 0))

    def update_transfer(self, count: float | None = 1) -> None:
        """Bytes on the network, which may be fewer: not shown."""

    def set_postfix_str(self, *_: Any, **__: Any) -> None: ...
    def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None: ...
    def set_description(self, *_: Any, **__: Any) -> None: ...
    def set_description_str(self, *_: Any, **__: Any) -> None: ...
    def refresh(self, *_: Any, **__: Any) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_gguf(names: Collection[str], gguf: str) -> bool:
    """Whether a repository of these files is run from GGUF: if one is named, or there is nothing else."""
    safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
    return bool(gguf) or (not safetensors and bool(gguf_models(dict.fromkeys(names, 0))))


def is_reachable() -> bool:
    """Return whether the hub answers at all, within seconds."""
    import huggingface_hub as hub

    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=_GLANCE)
    except Exception:  # the network fails in many shapes
        return False
    return True


def is_cached(repository: str) -> bool:
    """Whether the hub's cache has something of this repository, whole or not."""
    import huggingface_hub as hub

    return isinstance(hub.try_to_load_from_cache(repository, CONFIG), str)


@contextmanager
def _explained(repository: str, revision: str | None) -> Iterator[None]:
    """Turn whatever the hub's client raises into one line."""
    try:
        with disk_full(_hub_cache()):
            yield
    except OffspecError:
        raise
    except Exception as error:  # HTTP, sockets, and checks of what was received
        raise _refusal(error, repository, revision) or CheckpointError(
            f"the download of {repository} stopped ({one_line(error)}): "
            "run the same command again, the files that are finished are kept"
        ) from error


def _refusal(error: Exception, repository: str, revision: str | None) -> ModelNotFoundError | None:
    """The error to show when the hub did answer, and the answer was no."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"{repository} asks for permission: accept its terms at {page}, then run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{repository} has no revision {revision}: see {page}/tree/main")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"there is no folder {repository} here and no such public model at {constants.ENDPOINT}: "
            "check the spelling, or run `hf auth login` if it is private"
        )
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(
            f"{repository} is not a hub id ({one_line(error)}): write organisation/name"
        )
    return None


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
