"""`offspec config`, and the effect of its file on other commands."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import Result

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.user_config import UserConfig
from offspec.ui.cli import defaults
from offspec.ui.cli.main import app
from tests.support.fake_engine import ScriptedLoad
from tests.support.waiting import PATIENCE
from tests.ui.cli.program import environment, error_line

Call = Callable[..., Result]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFSPEC_CONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("OFFSPEC_THEME", raising=False)
    return tmp_path / "config" / "config.toml"


def test_set_get_list_unset_path(file: Path, offspec: Call) -> None:
    assert offspec("config", "path").stdout == f"{file}\n"
    assert offspec("config", "list").stdout == ""
    for key, value in (("model", "demo"), ("memory", "12GB"), ("context", "4096"), ("memory", "8GB")):
        assert offspec("config", "set", key, value).exit_code == 0
    assert file.read_text() == 'model = "demo"\nmemory = "8GB"\ncontext = 4096\n'
    assert offspec("config", "get", "memory").stdout == "8GB\n"
    assert offspec("config", "list").stdout == "model = demo\nmemory = 8GB\ncontext = 4096\n"
    assert offspec("config", "unset", "memory").exit_code == 0
    assert file.read_text() == 'model = "demo"\ncontext = 4096\n'
    assert "memory is not set; keys that are set: model, context" in error_line(
        offspec("config", "get", "memory")
    )
    assert "is not set" in error_line(offspec("config", "unset", "memory"))
    assert offspec("config", "set", "notify", "off").exit_code == 0
    assert defaults.default_map(get_command(app), [])["chat"]["notify"] == "off"


def test_comments_are_kept(file: Path) -> None:
    file.parent.mkdir()
    file.write_text('# my laptop\nmemory = "8GB"  # of 16\n\ndraft = "suffix"')
    UserConfig().set("memory", "9GB")
    UserConfig().set("context", 512)
    UserConfig().unset("draft")
    assert file.read_text() == '# my laptop\nmemory = "9GB"  # of 16\n\ncontext = 512\n'


def test_comment_after_a_value_is_kept(file: Path) -> None:
    file.parent.mkdir()
    for line in ('theme = "a # \\" b"# c', "theme='dark' # c", "  theme =1e3 # c", 'theme = ""# c'):
        file.write_text(f"{line}\n")
        UserConfig().set("theme", "light")
        assert file.read_text().endswith("# c\n") and UserConfig().values == {"theme": "light"}
    text = 'draft = """\nsuffix"""\n'  # a line that only a person can edit
    file.write_text(text)
    with pytest.raises(RequestError, match="change it by hand"):
        UserConfig().set("draft", "none")
    assert file.read_text() == text


def test_only_the_value_in_the_file_changes(file: Path, tmp_path: Path) -> None:
    """A link to it, its permissions and its line ends."""
    file.parent.mkdir()
    mine = tmp_path / "dotfiles.toml"
    mine.write_bytes(b'theme = "dark"\r\n# mine\r\n')
    mine.chmod(0o600)
    file.symlink_to(mine)
    UserConfig().set("theme", "light")
    UserConfig().set("context", 512)
    assert mine.read_bytes() == b'theme = "light"\r\n# mine\r\ncontext = 512\r\n'
    assert file.is_symlink() and mine.stat().st_mode & 0o777 == 0o600


def test_options_override_defaults(file: Path, offspec: Call, load: ScriptedLoad) -> None:
    for key, value in (("model", "./mine"), ("memory", "8GB"), ("draft", "suffix"), ("kv-cache", "int8")):
        offspec("config", "set", key, value)
    assert offspec("generate", "other", "Why?", "--memory", "1GB").exit_code == 0
    assert offspec("chat", input="Why?\n").exit_code == 0
    (generated, _), (chatted, _) = load.calls
    assert (generated.model, generated.memory, generated.draft, generated.kv_cache) == (
        "other",
        10**9,
        "suffix",
        "int8",
    )
    assert (chatted.model, chatted.memory, chatted.draft) == ("./mine", 8 * 10**9, "suffix")


def test_greedy_overrides_a_default_temperature(file: Path, offspec: Call, load: ScriptedLoad) -> None:
    load.engine.sampling_defaults = SamplingParams(temperature=0.6, top_k=20)
    offspec("config", "set", "temperature", "0.7")
    assert offspec("generate", "demo", "Why?").exit_code == 0
    assert offspec("generate", "demo", "Why?", "--greedy").exit_code == 0
    warm, greedy = (generated.params for engine in load.engines for generated in engine.requests)
    assert (warm, greedy) == (SamplingParams(temperature=0.7, top_k=20), SamplingParams())
    assert [config.temperature for config, _ in load.calls] == [0.7, 0.0]


@pytest.mark.parametrize("command", ["chat --resume", "serve", "pack"])
def test_missing_model_names_the_remedy(file: Path, offspec: Call, command: str) -> None:
    result = offspec(*command.split())
    said = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2
    assert "Missing argument 'MODEL'. Give a folder, a .gguf file, a Hugging Face id or demo" in said
    assert "offspec models lists downloaded models" in said


@pytest.mark.parametrize(
    "text,message",
    [
        ("# one\nmemroy = 1", "line 2: unknown key 'memroy'; valid keys are model, memory"),
        ('model = "m"\nmemory = "lots"', "line 2: invalid value 'lots' for memory: cannot read 'lots'"),
        ('theme = "pink"', "line 1: theme must be dark or light, not 'pink'"),
        ("draft-bits = 5", "line 1: invalid value 5 for draft-bits: --draft-bits must be 2, 3, 4 or 16"),
        ("model = [1]", "model must be a string or a number"),
        ("model: demo", "is not valid TOML: Expected '=' after a key in a key/value pair (at line 1"),
    ],
)
def test_invalid_file_is_one_error_line(file: Path, offspec: Call, text: str, message: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    line = error_line(offspec("generate", "demo", "Why?"))
    assert str(file) in line and message in line


@pytest.mark.parametrize(
    "key,value",
    [("contxt", "1"), ("device", "tpu"), ("context", "many"), ("theme", "pink"), ("notify", "loud")],
)
def test_invalid_values_are_not_set(file: Path, offspec: Call, key: str, value: str) -> None:
    result = offspec("config", "set", key, value)
    assert result.exit_code == 2 and key in error_line(result)
    assert not file.exists()


def test_inaccessible_file(file: Path, offspec: Call) -> None:
    file.parent.write_text("no folder")
    assert "(Not a directory): fix or remove the file" in error_line(offspec("config", "list"))
    file.parent.unlink()
    file.parent.mkdir()
    file.write_bytes(b"\xff")
    assert "not UTF-8" in error_line(offspec("config", "list"))


def test_plan_for_other_hardware_ignores_local_defaults(file: Path) -> None:
    for key, value in (("memory", "8GB"), ("draft", "suffix")):
        UserConfig().set(key, value)
    group = get_command(app)
    here, there = (defaults.default_map(group, words)["plan"] for words in ([], ["m", "--hardware=rtx-4090"]))
    assert here == {"memory": "8GB", "draft": "suffix"} and there == {"draft": "suffix"}


def test_theme_is_overridden_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    UserConfig().set("theme", "light")
    monkeypatch.setenv("OFFSPEC_THEME", "dark")
    defaults.default_map(get_command(app), [])
    assert os.environ["OFFSPEC_THEME"] == "dark"
    monkeypatch.setenv("OFFSPEC_THEME", "dark")  # and is restored afterwards
    monkeypatch.delenv("OFFSPEC_THEME")
    defaults.default_map(get_command(app), [])
    assert os.environ["OFFSPEC_THEME"] == "light"


def test_shells_complete_commands_without_torch() -> None:
    code = (
        "import sys; from offspec.ui.cli.main import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    variables = environment(_OFFSPEC_COMPLETE="complete_bash", COMP_WORDS="offspec mod", COMP_CWORD="1")
    shown = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=PATIENCE
    )
    assert "models" in shown.stdout and "Error" not in shown.stderr
