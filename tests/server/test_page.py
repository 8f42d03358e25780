"""The page in a real browser: answers, the engine panel, settings, a key, loading, and its layout."""

import json
import re
import tomllib
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.events import TreeSeen
from offspec.engine.engine import Engine
from offspec.server import web_page
from offspec.server.web_page import ROUTES
from offspec.ui.tui.tree_drawing import caption, draw
from tests.support.browser import Browser
from tests.support.chat_page import (
    IDLE,
    answers,
    ask,
    click,
    element,
    in_browser,
    press,
    prompt,
    served,
    text,
    wait_for,
)
from tests.support.fake_engine import PassGate, Script, ScriptedEngine, ScriptedLoad, load_progress
from tests.support.live_server import NAME, LiveServer
from tests.ui.tui.trees import bush, chain, sentence, tree

ROOT = Path(web_page.__file__).parents[2]
LONG = " ".join(f"word{i}" for i in range(400))
LINES = "[...document.querySelectorAll('#tree-lines li')].map(line => line.textContent)"
LOCKED = "!document.getElementById('key-form').hidden && document.activeElement.id == 'key'"

# Minimum contrast between visible text and its background.
CONTRAST = """(() => {
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const colour = text => text.match(/[\\d.]+/g).map(Number);
  const behind = at => { const c = colour(getComputedStyle(at).backgroundColor);
    return c.length == 4 && c[3] == 0 ? behind(at.parentElement) : c; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const at = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !at.checkVisibility() || at.closest('script')) continue;
    const two = [colour(getComputedStyle(at).color), behind(at)].map(light).sort((a, b) => b - a);
    found.push([(two[0] + 0.05) / (two[1] + 0.05), at.outerHTML]);
  }
  return found.sort((a, b) => a[0] - b[0])[0];
})()"""
WIDTH = "Math.max(document.documentElement.scrollWidth, innerWidth)"  # phones zoom out if content is wider


def files(url: str) -> list[str]:
    return [url + route.path for route in ROUTES]


def test_page_loads_nothing_from_other_hosts() -> None:
    there = {file.name for file in Path(web_page.__file__).with_name("page").iterdir()} - {"index.html"}
    assert {route.path for route in ROUTES} == {"/", *(f"/page/{name}" for name in there)}
    with LiveServer(ScriptedEngine(), api_key="open sesame") as server, server.http() as http:
        for url in files(server.url):
            answer = http.get(url, headers={"authorization": ""})
            assert answer.status_code == 200
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", answer.text)
            if "/markdown-it." in url:
                continue
            assert set(re.findall(r"https?://[\w.]*", answer.text)) <= {"http://www.w3.org"}
            assert not re.search(r"<script>|<style|style=|\son\w+=", answer.text)
            linked = re.findall(r'(?:src|href)="([^"]+)"|from "\./([^"]+)"', answer.text)
            assert {f"{server.url}/{page or f'page/{module}'}" for page, module in linked} <= {
                *files(server.url)
            }


def test_bundled_library_has_its_licence() -> None:
    folder = Path(web_page.__file__).with_name("page")
    version = re.match(r"/\*! markdown-it (\S+) ", (folder / "markdown-it.min.mjs").read_text())
    licence = folder / "markdown-it.LICENSE.txt"
    assert version and f"npm package markdown-it {version[1]}," in licence.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert str(licence.relative_to(ROOT)) in project["license-files"]


@in_browser
@pytest.mark.usefixtures("drafters_stay")
def test_answer_and_trees_are_shown(browser: Browser, live: LiveServer, alone: Engine) -> None:
    page = browser.open(live.url)
    page.wait(IDLE)
    click(page, "#panel-button")
    ask(page, "w12 w13")
    page.wait(f"{IDLE} && document.querySelector('.answer')?.innerText")
    question = [{"role": "user", "content": "w12 w13"}]
    whole = alone.generate(question, SamplingParams(max_tokens=2**31 - 1), speculate=False)
    assert answers(page)[0].split() == whole.text.split()
    assert page.value("document.title") == f"{NAME} – offspec"
    lines = page.value(LINES)
    assert lines[0].startswith("    0    100%  ● ")
    tree_caption = page.value("document.getElementById('tree-caption').textContent")
    passes = int(re.match(r"pass (\d+) of \1: ", tree_caption)[1])  # type: ignore[index]
    page.value("document.getElementById('tree-earlier').focus()")
    page.press(" ")
    assert page.value("document.getElementById('tree-caption').textContent").startswith(
        f"pass {passes - 1} of {passes}: "
    )
    assert "tokens per pass" in page.value("document.getElementById('speed').textContent")
    assert page.value("document.querySelectorAll('#history-bars i').length") == passes
    assert not page.errors()


@in_browser
def test_trees_look_as_in_the_terminal(browser: Browser, live: LiveServer) -> None:
    signs = ["\x1b[2J", "\u202eabc", "\u0301", "e\u0301", "天空", "🙂", "x" * 41, "\u200d", " a\tb\r\n", ""]
    odd = tree([-1, *range(len(signs))], ["a", *signs], [1.0, *[0.5] * len(signs)], [0], "")
    trees: list[TreeSeen] = [sentence(), chain(60), bush(300), odd]
    page = browser.open(live.url)
    for each, folded in product(trees, (True, False)):
        # Python rounds a tie between two figures to even, JavaScript rounds it up.
        seen = replace(each, probability=tuple(0.999 * chance for chance in each.probability))
        given = json.dumps(asdict(seen))
        drawn = page.value(
            f"import('/page/tree_drawing.js').then(m => [m.caption({given}, 2, 3),"
            f" m.draw({given}, {json.dumps(folded)}).map(line => line.map(span => span[1]).join(''))])"
        )
        expected = ["".join(span.text for span in line) for line in draw(seen, folded=folded)]
        assert drawn == [caption(seen, 2, 3), expected]


@in_browser
def test_esc_stops_and_keeps_an_answer(browser: Browser) -> None:
    engine = ScriptedEngine([LONG, "It goes on."])
    engine.gate = PassGate(3)
    with served(engine) as server:
        page = browser.open(server.url)
        ask(page, "Why?")
        page.wait("document.querySelector('.answer')?.innerText.includes('word8')")
        assert page.value("document.getElementById('send').textContent") == "Stop"
        page.press("Escape")
        page.wait(IDLE)
        server.wait_until_idle()
        engine.gate.set()
        assert page.value("document.querySelector('.note').textContent") == "stopped"
        kept = answers(page)[0]
        assert kept.startswith("word0") and not kept.endswith("word399")
        ask(page, "And?")
        page.wait(f"{IDLE} && document.querySelectorAll('.answer')[1]?.innerText")
        assert answers(page)[1] == "It goes on."
        assert prompt(engine) == f"<|user|>Why?\n<|assistant|>{kept}\n<|user|>And?\n<|assistant|>"


@in_browser
def test_question_returns_if_stopped_before_its_answer(browser: Browser) -> None:
    engine = ScriptedEngine([LONG])
    engine.gate.clear()
    with served(engine) as server:
        page = browser.open(server.url)
        page.wait(IDLE)
        page.write("one")
        page.press("Enter", shift=True)
        page.write("two")
        page.press("Enter")
        page.wait("document.getElementById('state').textContent.startsWith('waiting')")
        click(page, "#send")
        page.wait(IDLE)
        engine.gate.set()
        server.wait_until_idle()
        assert page.value("document.getElementById('question').value") == "one\ntwo"
        assert page.value("document.querySelectorAll('article').length") == 0
        assert page.value("document.getElementById('start').checkVisibility()")


@in_browser
def test_errors_are_shown(browser: Browser) -> None:
    with served(ScriptedEngine([Script(LONG, fail_after=2)], context=500)) as server:
        page = browser.open(server.url)
        ask(page, LONG + LONG)
        page.wait("document.getElementById('error').textContent.includes('the prompt is too long')")
        assert page.value("document.getElementById('question').value") == LONG + LONG
        page.value("document.getElementById('question').value = ''")
        ask(page, "Why?")
        page.wait("document.getElementById('error').textContent.includes('the server\\'s log')")
        assert answers(page)[0].startswith("word0")


@in_browser
def test_page_prompts_for_the_key(browser: Browser) -> None:
    with served(ScriptedEngine(), api_key="open sesame") as server:
        page = browser.open(server.url)
        page.wait(LOCKED)
        page.write("shut")
        page.press("Enter")
        page.wait("document.getElementById('error').textContent == 'This is not the server\\'s key'")
        page.write("open sesame")
        page.press("Enter")
        page.wait(f"{IDLE} && document.activeElement.id == 'question'")
        ask(page, "Why?")
        page.wait(f"{IDLE} && document.querySelector('.answer')?.innerText == 'The sky is blue.'")
        page.go(server.url)
        page.wait(IDLE)


@in_browser
def test_loading_progress_is_shown(browser: Browser) -> None:
    load = ScriptedLoad(ScriptedEngine(), progress=load_progress(4)[:2])
    load.gate.clear()
    with LiveServer(lambda notify: load(EngineConfig(NAME), None, notify), ready=False) as server:
        page = browser.open(server.url)
        page.wait("document.getElementById('load-stage').textContent == 'reading the model 50%'")
        assert page.value("document.getElementById('load-progress').value") == 0.5
        assert page.value("document.getElementById('send').disabled")
        load.gate.set()
        page.wait(IDLE)
        assert page.value("document.getElementById('loading').hidden")


@in_browser
def test_text_is_legible_and_fits(browser: Browser) -> None:
    """In both colour schemes, on a wide and a narrow screen, with every element shown."""
    wide = f"{'w' * 300} `code`\n\n```sh\n{'long ' * 60}\n```\n\n|{'a b | ' * 20}\n{'|-' * 20}|\n\n> [a](http://b)"
    with served(ScriptedEngine([wide])) as server:
        page = browser.open(server.url)
        page.wait(IDLE)
        click(page, "#panel-button")
        ask(page, "Why? " * 60)
        page.wait(f"{IDLE} && {element('.answer pre')}")
        page.value("document.getElementById('error').textContent = 'an error'")
        page.value(
            "for (const id of ['key-form', 'loading', 'start']) document.getElementById(id).hidden = false"
        )
        assert page.value("document.querySelectorAll('#tree-lines li').length") > 2
        for dialog, width, scheme in product(
            ("", "conversations", "settings"), (1280, 390), ("light", "dark")
        ):
            page.set_viewport(width, 800, scheme)
            if dialog:
                click(page, f"#{dialog}-button")
            contrast, where = page.value(CONTRAST)
            assert contrast >= 4.5, where
            assert page.value(WIDTH) == width
            for part in ("messages", "panel", "start", "conversations", "settings"):
                assert page.value(f"(part => part.scrollWidth - part.clientWidth)({part})") <= 0
            if dialog:
                right = page.value(f"document.getElementById('{dialog}').getBoundingClientRect().right")
                assert 0 < right <= width
                page.value(f"document.getElementById('{dialog}').close()")


@in_browser
def test_answer_fills_the_height_of_a_phone(browser: Browser) -> None:
    with served(ScriptedEngine([LONG])) as server:
        page = browser.open(server.url, 390)
        ask(page, "Why?")
        page.wait(f"{IDLE} && {element('.answer')}.innerText.endsWith('word399')")
        height = "document.getElementById('messages').clientHeight"
        assert page.value(height) > 0.8 * 800
        assert page.value("(box => box.scrollTop + box.clientHeight + 1 >= box.scrollHeight)(messages)")
        click(page, "#panel-button")
        assert page.value(height) > 0.8 * 800
        assert not page.value(
            "document.getElementById('messages').checkVisibility({visibilityProperty: true})"
        )
        click(page, "#panel-close")
        assert page.value("document.getElementById('messages').checkVisibility({visibilityProperty: true})")


@in_browser
def test_everything_is_reachable_by_keyboard(browser: Browser) -> None:
    with served(ScriptedEngine(["See [this](http://a.b).\n\n```\ncode\n```"])) as server:
        page = browser.open(server.url)
        page.wait(f"{IDLE} && document.activeElement.id == 'question'")
        ask(page, "Why?")
        page.wait(f"{IDLE} && {element('.answer pre')}")
        press(page, "#panel-button")
        page.value("document.getElementById('conversations-button').focus()")
        reached = []
        for _ in range(17):
            page.press("Tab")
            reached.append(
                page.value("(at => at.ariaLabel || at.id || at.localName)(document.activeElement)")
            )
            assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        assert reached == [
            *("new-button", "panel-button", "settings-button", "Conversation", "Edit message"),
            *("a", "Copy code", "pre", "Copy answer", "Regenerate answer"),
            *("panel-close", "tree-earlier", "tree-later", "tree-folded", "Nodes: depth, chance, token"),
            *("question", "send"),
        ]


@in_browser
def test_empty_page_has_examples(browser: Browser) -> None:
    engine = ScriptedEngine()
    with served(engine) as server:
        page = browser.open(server.url)
        page.wait(IDLE)
        press(page, "#examples button:nth-child(2)")
        wait_for(page, "The sky is blue.")
        assert prompt(engine) == "<|user|>Compare TCP and UDP in a table.\n<|assistant|>"
        assert not page.value("document.getElementById('start').checkVisibility()")
        assert not page.errors()


@in_browser
def test_panel_starts_closed_and_keeps_its_state(browser: Browser) -> None:
    engine = ScriptedEngine()
    with served(engine) as server:
        page = browser.open(server.url)
        ask(page, "Why?")
        wait_for(page, "The sky is blue.")
        assert not engine.requests[-1].trees
        assert not page.value("document.getElementById('panel').checkVisibility()")
        press(page, "#panel-button")
        assert page.value("document.getElementById('panel-button').ariaExpanded") == "true"
        page.go(server.url)
        wait_for(page, "The sky is blue.")
        assert page.value("document.getElementById('panel').checkVisibility()")
        ask(page, "Why?")
        wait_for(page, "The sky is blue.", "The sky is blue.")
        assert engine.requests[-1].trees
        press(page, "#panel-close")
        assert page.value("document.activeElement.id") == "panel-button"
        page.go(server.url)
        assert not page.value("document.getElementById('panel').checkVisibility()")


SETTINGS = {
    "system": "Be brief.",
    "temperature": "0.5",
    "top_p": "0.9",
    "max_completion_tokens": "2",
    "seed": "11",
}


@in_browser
def test_settings_are_sent_and_stored(browser: Browser) -> None:
    engine = ScriptedEngine()
    with served(engine) as server:
        page = browser.open(server.url)
        page.wait(IDLE)
        press(page, "#settings-button")
        for name, value in SETTINGS.items():
            page.value(f"document.getElementsByName({name!r})[0].focus()")
            page.write(value)
        press(page, "#settings button[type=submit]")
        assert not page.value("document.getElementById('settings').open")
        page.go(server.url)
        ask(page, "Why?")
        wait_for(page, "The sky")
        assert text(page, ".note").startswith("truncated: token limit reached or context full")
        assert prompt(engine) == "<|system|>Be brief.\n<|user|>Why?\n<|assistant|>"
        expected = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=2, seed=11)
        assert engine.requests[-1].params == expected
        # Esc and invalid values leave the settings unchanged.
        click(page, "#settings-button")
        page.value("document.getElementsByName('temperature')[0].value = 3")
        click(page, "#settings button[type=submit]")
        assert page.value("document.getElementById('settings').open")
        page.press("Escape")
        assert not page.value("document.getElementById('settings').open")
        press(page, "#settings-button")
        assert page.value("document.getElementsByName('temperature')[0].value") == "0.5"
        click(page, "#settings-clear")
        click(page, "#settings button[type=submit]")
        ask(page, "Why?")
        wait_for(page, "The sky", "The sky is blue.")
        assert "system" not in prompt(engine) and engine.requests[-1].params.temperature == 0
        assert not page.errors()


@in_browser
def test_damaged_settings_are_ignored(browser: Browser) -> None:
    engine = ScriptedEngine()
    with served(engine) as server:
        page = browser.open(server.url)
        damaged = ("{", "null", "[1]", '{"temperature": "hot", "seed": "-1", "top_p": {}, "system": 5}')
        for count, stored in enumerate(damaged, 1):
            page.value(f"localStorage.setItem('offspec-settings', {stored!r})")
            page.go(server.url)
            ask(page, "Why?")
            wait_for(page, *["The sky is blue."] * count)
            assert engine.requests[-1].params.temperature == 0
            assert prompt(engine).startswith("<|user|>Why?")
        assert not page.errors()
