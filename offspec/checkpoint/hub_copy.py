"""What the hub's own cache holds of a repository, for when the hub cannot be asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from offspec.checkpoint.folder import CONFIG
from offspec.checkpoint.ranges import one_line
from offspec.core.errors import ModelNotFoundError
from offspec.core.events import Event, Notice


class HubCopy:
    """A repository's copy in the cache; error: why the hub did not answer."""

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
