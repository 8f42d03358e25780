"""User defaults in a TOML file of plain keys and values, edited line by line to keep comments."""

import json
import re
import tomllib

from offspec.core.cache_dir import user_folder
from offspec.core.errors import RequestError
from offspec.core.files import as_disk_full_error, real_path, write_atomic

Value = str | int | float

_ELSEWHERE = "set OFFSPEC_CONFIG to another folder"


class UserConfig:
    """Contents of config.toml in $OFFSPEC_CONFIG, $XDG_CONFIG_HOME/offspec or ~/.config/offspec.

    Raises RequestError, with the file and if possible the line, if it cannot be read as keys and values.
    """

    def __init__(self) -> None:
        self.file = user_folder("OFFSPEC_CONFIG", "XDG_CONFIG_HOME", ".config") / "config.toml"
        self._text = self._read()
        self.values = self._parse(self._text)

    def line(self, key: str) -> int:
        """Return the line number of a key, counted from 1; 0 if it cannot be found."""
        match = _line_of(key).search(self._text)
        return 0 if match is None else self._text.count("\n", 0, match.start()) + 1

    def wrong(self, key: str, why: str) -> RequestError:
        """Return an error for a key, with its position and the reason."""
        return RequestError(f"{self.file}, line {self.line(key)}: {why}")

    def set(self, key: str, value: Value) -> None:
        """Set a key, replacing its present value if there is one."""
        written = json.dumps(value, ensure_ascii=False)
        text, count = _value_of(key).subn(lambda found: found[1] + written, self._text, count=1)
        if not count:
            end = "\r\n" if "\r\n" in self._text else "\n"
            begun = "" if self._text.endswith("\n") or not self._text else end
            text = f"{self._text}{begun}{key} = {written}{end}"
        self._write(text, self.values | {key: value})

    def unset(self, key: str) -> None:
        """Remove a key. Raises KeyError if it is not set."""
        rest = dict(self.values)
        del rest[key]
        self._write(re.sub(_line_of(key).pattern + r"\n?", "", self._text, flags=re.MULTILINE), rest)

    def _read(self) -> str:
        try:
            return self.file.read_bytes().decode("utf-8")  # keeps line endings
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise RequestError(
                f"cannot read the defaults in {self.file} ({why}): fix or remove the file"
            ) from error

    def _parse(self, text: str) -> dict[str, Value]:
        try:
            found = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RequestError(f"{self.file} is not valid TOML: {error}; fix or remove it") from error
        for key, value in found.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise RequestError(f'{self.file}: {key} must be a string or a number, as in: memory = "12GB"')
        return found

    def _write(self, text: str, expected: dict[str, Value]) -> None:
        try:
            same = tomllib.loads(text) == expected
        except tomllib.TOMLDecodeError:
            same = False
        if not same:
            raise RequestError(f"cannot edit {self.file} automatically: change it by hand")
        try:
            with as_disk_full_error(self.file):
                file = real_path(self.file)  # keep a symbolic link, for example into a dotfiles folder
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(file, text.encode(), file.stat().st_mode & 0o777 if file.exists() else 0o666)
        except OSError as error:
            raise RequestError(
                f"cannot write {self.file} ({error.strerror or error}): {_ELSEWHERE}"
            ) from error
        self._text, self.values = text, expected


def _value_of(key: str) -> re.Pattern[str]:
    """Return the pattern of a key's value, without a trailing comment; group 1 is the text before it."""
    value = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s#"']+)"""
    return re.compile(rf"^([ \t]*{re.escape(key)}[ \t]*=[ \t]*){value}", re.MULTILINE)


def _line_of(key: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*{re.escape(key)}[ \t]*=.*$", re.MULTILINE)
