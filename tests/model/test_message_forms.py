"""Messages of coding agents with chat templates that refuse or omit some of them."""

from typing import Any

import pytest

from offspec.core.errors import RequestError
from offspec.model.chat_template import message_variants
from offspec.model.tokenizer import TextCodec, load_tokenizer
from tests.support.tokenizers import byte_level, saved

WRITE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# it knows tools #}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be first.') }}{% endif %}{% endfor %}" + WRITE
)
ALTERNATE = (
    "{% set ns = namespace(at=0) %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.at % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% set ns.at = ns.at + 1 %}{% endif %}{% endfor %}" + FIRST
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}" + ALTERNATE
)
FORGETS = WRITE.replace("[{{", "{% if m.role != 'system' or loop.first %}[{{").replace(
    "{% endfor", "{% endif %}{% endfor"
)
DROPS_SYSTEM = WRITE.replace(" in messages ", " in messages if m.role != 'system' ")
EITHER = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('Not both content and thinking.') }}{% endif %}{% endfor %}" + WRITE
)
CALL: dict[str, Any] = {"type": "function", "function": {"name": "ls", "arguments": {}}}


def messages_of(*texts: str) -> list[dict[str, Any]]:
    """Return messages from "role: text"; a + after the role stands for a tool call."""
    messages = list[dict[str, Any]]()
    for text in texts:
        role, content = text.split(": ")
        messages.append({"role": role.rstrip("+"), "content": content})
        if role.endswith("+"):
            messages[-1] |= {"tool_calls": [CALL], "reasoning_content": "Hm."}
    return messages


CODEX = messages_of("developer: A", "developer: B", "user: C", "user: D")
CLAUDE = messages_of("system: A", "user: B", "system: C", "assistant+: D", "tool: E", "user: F")
JOINED = "[system]A\n\nB[user]C\n\nD"
KEPT = "[system]A[user]B\n\nC[assistant]D[tool]E"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = saved(byte_level(), tmp_path_factory.mktemp("model"))
    return TextCodec(load_tokenizer(folder), folder, {})


@pytest.mark.parametrize(
    ("template", "codex", "claude"),
    [
        (WRITE, "[system]A[system]B[user]C[user]D", "[system]A[user]B[system]C[assistant]D[tool]E[user]F"),
        (FIRST, JOINED, f"{KEPT}[user]F"),
        (FORGETS, JOINED, f"{KEPT}[user]F"),
        (ALTERNATE, JOINED, f"{KEPT}\n\nF"),
        (NO_SYSTEM, "[user]A\n\nB\n\nC\n\nD", "[user]A\n\nB\n\nC[assistant]D[tool]E\n\nF"),
        (DROPS_SYSTEM, "[user]A\n\nB\n\nC\n\nD", "[user]A\n\nB\n\nC[assistant]D[tool]E\n\nF"),
        (EITHER, "[system]A[system]B[user]C[user]D", f"{KEPT}[user]F"),
    ],
)
def test_messages_of_agents(codec: TextCodec, template: str, codex: str, claude: str) -> None:
    codec.tokenizer.chat_template = template
    assert codec.render(CODEX) == codex
    assert codec.render(CLAUDE) == claude


def test_messages_that_no_variant_fits_are_refused_with_the_first_error(codec: TextCodec) -> None:
    refuse = (
        "{% if messages | length > 1 %}{{ raise_exception('Two.') }}{% endif %}{{ raise_exception('Odd.') }}"
    )
    codec.tokenizer.chat_template = refuse
    with pytest.raises(RequestError, match=r"template refuses the prompt: Two\.$"):
        codec.render(CODEX)
    codec.tokenizer.chat_template = "{{ messages[0].role }} says something{# it knows tools #}"
    assert codec.render(CLAUDE) == "system says something"


def test_each_variant_is_tried_once_and_an_answer_can_be_continued(codec: TextCodec) -> None:
    plain = messages_of("system: A", "user: B", "assistant: C")
    assert [*message_variants(plain[1:])] == [plain[1:]]
    assert len([*message_variants(plain)]) == 2  # without a system message
    codec.tokenizer.chat_template = NO_SYSTEM
    assert codec.render(plain, continue_final_message=True) == "[user]A\n\nB[assistant]C"


def test_no_text_is_lost() -> None:
    messages = messages_of(
        "user:  ", *(f"{role}: {role}{at}" for at in range(3) for role in ("system", "user", "tool"))
    )
    for form in message_variants(messages):
        assert sorted("\n\n".join(each["content"] for each in form).split()) == sorted(
            each["content"] for each in messages[1:]
        )
