"""Downloading a model or a draft head from the Hugging Face Hub into the Hub's own cache.

Files are downloaded one after another (each in parallel chunks if the Hub offers that), so Ctrl-C ends a
download at once: the threads of `snapshot_download` keep the process alive until the Hub answers each of
them. A later run keeps finished files and resumes the interrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from offspec.checkpoint.folder import CONFIG, INDEX, TEXT_FILES, choose_weights, open_folder
from offspec.checkpoint.gguf.split import read_model
from offspec.checkpoint.hub_gguf import choose_gguf, gguf_models
from offspec.checkpoint.hub_name import HubName
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.quantized import check_method
from offspec.checkpoint.ranges import one_line
from offspec.core.errors import CheckpointError, DiskFullError, ModelNotFoundError, UnsupportedModelError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.core.files import as_disk_full_error, require_space

_ANSWER_TIMEOUT = 20.0  # seconds to wait for the hub's first answer
_PROBE_TIMEOUT = 3.0  # seconds to wait before an optional download is skipped

# (names of a repository's files, reader of its JSON files) -> names of the files to download
Choose = Callable[[Collection[str], Callable[[str], dict[str, Any]]], Sequence[str]]


def download(name: HubName, notify: Callable[[Event], None]) -> Path:
    """Download the missing files of a hub model.

    Without a network, or with HF_HUB_OFFLINE, the cached copy is used if it is complete.

    Returns:
        The folder with its safetensors, configuration and tokenizer; or its GGUF file, the first part if it
        is split.

    Raises:
        ModelNotFoundError: The id, the revision or the GGUF name is unknown, the model needs permission, or
            the repository has several GGUF models and none was named.
        CheckpointError: The repository has no readable weights, or the download was interrupted.
        DiskFullError: The disk has too little space.
    """
    return _source(name.repository, name.revision, notify).model(name.gguf)


def download_head(
    repository: str, revision: str | None, notify: Callable[[Event], None], choose: Choose
) -> Path | None:
    """Download the files that `choose` selects and config.json; return their folder.

    Selected files may be pickles. Returns None if `choose` selects nothing: then only the files that it read
    are downloaded. Raises as `download` does.
    """
    return _source(repository, revision, notify).head(choose)


def _source(
    repository: str, revision: str | None, notify: Callable[[Event], None]
) -> _Download | _CachedCopy:
    """Return the repository on the hub, or its cached copy if the hub does not answer."""
    import huggingface_hub as hub

    api = hub.HfApi(library_name="offspec")
    try:
        info = api.model_info(repository, revision=revision, files_metadata=True, timeout=_ANSWER_TIMEOUT)
    except Exception as error:  # network failures have many types
        if refused := _refusal(error, repository, revision):
            raise refused from error
        return _CachedCopy(repository, revision, error, notify)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return _Download(repository, revision, str(info.sha), sizes, notify)


class _CachedCopy:
    """Cached copy of a repository in the hub's own cache. error: why the hub is unreachable."""

    def __init__(
        self, repository: str, revision: str | None, error: Exception, notify: Callable[[Event], None]
    ) -> None:
        from huggingface_hub import constants, errors

        self._repository, self._revision, self._notify = repository, revision, notify
        self._offline = isinstance(error, errors.OfflineModeIsEnabled)
        self._unreached = f"{constants.ENDPOINT} cannot be reached"
        self._why = "HF_HUB_OFFLINE is set" if self._offline else f"{self._unreached} ({one_line(error)})"

    def model(self, gguf: str) -> Path:
        """Return the model's folder or GGUF file. Raises ModelNotFoundError if it is absent or incomplete."""
        path = folder = self._folder()
        sizes = {
            file.relative_to(folder).as_posix(): file.stat().st_size
            for file in folder.rglob("*")
            if file.is_file()
        }
        try:
            if _is_gguf(sizes, gguf):
                path = folder / self._chosen(sizes, gguf)
                read_model(path)
            else:
                open_folder(folder)
        except (UnsupportedModelError, ModelNotFoundError):
            raise
        except CheckpointError as damage:
            raise self._incomplete() from damage
        return self._used(path)

    def head(self, choose: Choose) -> Path | None:
        """Return the folder if config.json and the files `choose` selects exist; None if it selects none."""
        folder = self._folder()
        names = {file.name for file in folder.iterdir()}
        wanted = choose(names, lambda name: read_json(folder / name))
        if not all((folder / name).exists() for name in wanted):
            raise self._incomplete()
        return self._used(folder) if wanted else None

    def _folder(self) -> Path:
        """Return the copy's folder, complete or not. Raises ModelNotFoundError if there is none."""
        import huggingface_hub as hub

        try:
            found = hub.snapshot_download(
                self._repository, revision=self._revision, local_files_only=True, allow_patterns=[CONFIG]
            )
        except (OSError, ValueError) as missing:
            raise self._error(f"the Hugging Face cache has no copy of {self._repository}") from missing
        return Path(found)

    def _chosen(self, sizes: dict[str, int], gguf: str) -> str:
        models = gguf_models(sizes)
        if not models:
            raise self._error(f"the Hugging Face cache has no copy of {self._repository}:{gguf}")
        try:
            return choose_gguf(models, gguf, self._repository).files[0]
        except ModelNotFoundError as error:
            raise ModelNotFoundError(f"{self._why}, and in the Hugging Face cache {error}") from error

    def _incomplete(self) -> ModelNotFoundError:
        return self._error(f"the copy of {self._repository} in the Hugging Face cache is incomplete")

    def _used(self, path: Path) -> Path:
        """Notify that the cached copy is used, unless HF_HUB_OFFLINE requests that."""
        if not self._offline:
            self._notify(Notice(f"{self._unreached}: using the cached copy of {self._repository}"))
        return path

    def _error(self, what: str) -> ModelNotFoundError:
        again = "connect to the network and run the command again"
        fix = "unset it for the download" if self._offline else again
        return ModelNotFoundError(f"{self._why}, and {what}: {fix}")


class _Download:
    """Download of files of one commit, with known sizes and counted bytes."""

    def __init__(
        self,
        repository: str,
        revision: str | None,
        commit: str,
        sizes: dict[str, int],
        notify: Callable[[Event], None],
    ) -> None:
        self._repository, self._revision, self._commit = repository, revision, commit
        self._sizes, self._notify = sizes, notify
        self._top = {name: size for name, size in sizes.items() if "/" not in name}
        self._done = self._total = self._sent = 0

    def model(self, gguf: str) -> Path:
        """Fetch the files of the model. Return its folder, or the first of its GGUF files."""
        if _is_gguf(self._sizes, gguf):
            files = choose_gguf(gguf_models(self._sizes), gguf, self._repository).files
            return self._fetch((), files, files[0])
        place = f"the hub repository {self._repository}"
        weights, _ = choose_weights(self._top, lambda: self._json(INDEX), place)
        if CONFIG not in self._top:
            raise CheckpointError(f"{place} is not a model that transformers can load: it has no {CONFIG}")
        texts = [name for name in self._top if name.endswith(TEXT_FILES)]
        return self._fetch(texts, weights, CONFIG).parent

    def head(self, choose: Choose) -> Path | None:
        """Fetch config.json and the files that `choose` selects. Return their folder, if any."""
        weights = choose(self._top, self._json)
        return self._fetch([CONFIG], weights, CONFIG).parent if weights else None

    def _fetch(self, texts: Sequence[str], weights: Sequence[str], first: str) -> Path:
        """Fetch files that are missing or partial in the cache. Return the path of `first`."""
        if missing := [name for name in weights if name not in self._sizes]:
            raise CheckpointError(
                f"the hub repository {self._repository} lacks {missing[0]}, a part of the model: "
                "choose another revision"
            )
        files = [*texts, *weights]
        new = {
            name: self._sizes[name] for name in files if not is_cached(self._repository, name, self._commit)
        }
        self._total, finished = sum(new.values()), 0
        require_space(_hub_cache(), self._total, f"downloading {self._repository}", "HF_HOME")
        for name in files:
            path = self._file(name)
            finished += new.get(name, 0)
            self._report(finished)  # some files are fetched without a progress bar
            if name == CONFIG:  # fetched before the weights
                check_method(read_json(path))
        # Only now does the revision's name point to this commit in the cache: offline, a copy is complete or
        # absent.
        return self._file(first, self._revision or "main")

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self._file(name))

    def _file(self, name: str, revision: str | None = None) -> Path:
        """Fetch one file, of the commit by default. Raises each error of the hub's client as one line."""
        import huggingface_hub as hub

        try:
            with as_disk_full_error(_hub_cache()):
                path = hub.hf_hub_download(
                    self._repository,
                    name,
                    revision=revision or self._commit,
                    library_name="offspec",
                    tqdm_class=_bar(lambda count: self._report(self._done + count)),
                )
        except DiskFullError:
            raise
        except Exception as error:  # HTTP, sockets, and checks of the received data
            raise _refusal(error, self._repository, self._revision) or CheckpointError(
                f"the download of {self._repository} stopped ({one_line(error)}): "
                "run the same command again, finished files are kept"
            ) from error
        return Path(path)

    def _report(self, done: int) -> None:
        """Report progress for each further percent of the bytes."""
        self._done = done
        share = 100 * done // max(1, self._total)
        if share != self._sent and self._total:
            self._sent = share
            self._notify(LoadProgress(f"downloading {self._repository}", done, self._total, "bytes"))


def _bar(add: Callable[[int], None]) -> type[Any]:
    """Return a silent progress bar class that passes counts of bytes written to disk to `add`."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
            super().__init__(disable=True)  # type: ignore[no-untyped-call]
            self.update(initial)

        def update(self, count: float | None = 1) -> None:
            add(int(count or 0))

        def update_transfer(self, count: float | None = 1) -> None:
            """Ignore bytes on the network, which may be fewer than the bytes written."""

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

    return Bar


def _is_gguf(names: Collection[str], gguf: str) -> bool:
    """Return whether to run a repository from GGUF: a GGUF model is named, or there is nothing else."""
    safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
    return bool(gguf) or (not safetensors and bool(gguf_models(dict.fromkeys(names, 0))))


def is_reachable() -> bool:
    """Return whether the hub answers at all, within seconds."""
    import huggingface_hub as hub

    try:
        hub.get_session().head(hub.constants.ENDPOINT, timeout=_PROBE_TIMEOUT)
    except Exception:  # network failures have many types
        return False
    return True


def is_cached(repository: str, file: str = CONFIG, commit: str | None = None) -> bool:
    """Return whether the hub's cache has a file of a repository: config.json of any copy by default."""
    import huggingface_hub as hub

    return isinstance(hub.try_to_load_from_cache(repository, file, revision=commit), str)


def _refusal(error: Exception, repository: str, revision: str | None) -> ModelNotFoundError | None:
    """Return the error for a hub that answered and refused; None if it did not answer."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, errors.GatedRepoError):
        return ModelNotFoundError(
            f"{repository} requires permission: accept its terms at {page}, then run `hf auth login`"
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
            f"{repository} is not a hub id ({one_line(error)}): write organization/name"
        )
    return None


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
