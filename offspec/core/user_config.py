"""The user's defaults: one TOML file of plain keys and values, edited line by line so that comments stay."""

import json
import re
import tomllib

from offspec.core.cache_dir import user_folder
from offspec.core.errors import RequestError
from offspec.core.files import disk_full, real_path, write_file

Value = str | int | float

_ELSEWHERE = "set OFFSPEC_CONFIG to another folder"


class UserConfig:
    """The file config.toml in $OFFSPEC_CONFIG, $XDG_CONFIG_HOME/offspec or ~/.config/offspec.

    Raises RequestError, with the file and where it can the line, for what cannot be read as keys and values.
    """

    def __init__(self) -> None:
        self.file = user_folder("OFFSPEC_CONFIG", "XDG_CONFIG_HOME", ".config") / "config.toml"
        self._text = self._read()
        self.values = self._parse(self._text)

    def line(self, key: str) -> int:
        """The line of a key, from 1 on; 0 where it is not to be seen."""
        match = _line_of(key).search(self._text)
        return 0 if match is None else self._text.count("\n", 0, match.start()) + 1

    def wrong(self, key: str, why: str) -> RequestError:
        """The error for a key: where it is, and what is wrong."""
        return RequestError(f"{self.file}, line {self.line(key)}: {why}")

    def set(self, key: str, value: Value) -> None:
        """Write a value, in the place of one that is there."""
        written = json.dumps(value, ensure_ascii=False)
        text, count = _value_of(key).subn(lambda found: found[1] + written, self._text, count=1)
        if not count:
            end = "\r\n" if "\r\n" in self._text else "\n"
            begun = "" if self._text.endswith("\n") or not self._text else end
            text = f"{self._text}{begun}{key} = {written}{end}"
        self._write(text, self.values | {key: value})

    def unset(self, key: str) -> None:
        """Take a value out; KeyError where there is none."""
        rest = dict(self.values)
        del rest[key]
        self._write(re.sub(_line_of(key).pattern + r"\n?", "", self._text, flags=re.MULTILINE), rest)

    def _read(self) -> str:
        try:
            return self.file.read_bytes().decode("utf-8")  # ends of lines stay as they are
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise RequestError(
                f"the defaults in {self.file} cannot be read ({why}): mend or remove it"
            ) from error

    def _parse(self, text: str) -> dict[str, Value]:
        try:
            found = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RequestError(f"{self.file} is not TOML: {error}; mend or remove it") from error
        for key, value in found.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise RequestError(f'{self.file}: {key} must be a text or a number, as in: memory = "12GB"')
        return found

    def _write(self, text: str, expected: dict[str, Value]) -> None:
        try:
            same = tomllib.loads(text) == expected
        except tomllib.TOMLDecodeError:
            same = False
        if not same:
            raise RequestError(f"{self.file} is written in a way that only you can edit: change it by hand")
        try:
            with disk_full(self.file):
                file = real_path(self.file)  # a link, as to a folder of dotfiles, stays one
                file.parent.mkdir(parents=True, exist_ok=True)
                write_file(file, text.encode(), file.stat().st_mode & 0o777 if file.exists() else 0o666)
        except OSError as error:
            raise RequestError(
                f"cannot write {self.file} ({error.strerror or error}): {_ELSEWHERE}"
            ) from error
        self._text, self.values = text, expected


def _value_of(key: str) -> re.Pattern[str]:
    """The value of a key without a comment after it; a group has what is before it on its line."""
    value = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s#"']+)"""
    return re.compile(rf"^([ \t]*{re.escape(key)}[ \t]*=[ \t]*){value}", re.MULTILINE)


def _line_of(key: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*{re.escape(key)}[ \t]*=.*$", re.MULTILINE)
