"""The page in a real browser: questions, stopping, trees, a key, loading, and whether it can be read."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.events import TreeSeen
from offspec.engine.engine import Engine
from offspec.server import web_page
from offspec.server.web_page import ROUTES
from offspec.ui.tui.tree_drawing import caption, draw
from tests.support.browser import CHROMIUM, Browser, Page
from tests.support.fake_engine import Script, ScriptedEngine, ScriptedLoad, Turnstile, reading
from tests.support.live_server import NAME, LiveServer
from tests.ui.tui.trees import bush, chain, sentence, tree

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
LONG = " ".join(f"word{i}" for i in range(400))
IDLE = "document.getElementById('send').textContent == 'Send' && !document.getElementById('send').disabled"
LINES = "[...document.querySelectorAll('#tree-lines li')].map(line => line.textContent)"
LOCKED = "!document.getElementById('key-form').hidden && document.activeElement.id == 'key'"

# The least contrast of text that is seen with what is behind it.
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
WIDTH = "Math.max(document.documentElement.scrollWidth, innerWidth)"  # phones zoom out to what is wider


def files(url: str) -> list[str]:
    return [url + route.path for route in ROUTES]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def served(engine: ScriptedEngine, **settings: Any) -> LiveServer:
    load = ScriptedLoad(engine)
    return LiveServer(lambda notify: load(EngineConfig(NAME), None, notify), **settings)


def asked(page: Page, question: str) -> None:
    page.wait(IDLE)
    page.value("document.getElementById('question').focus()")
    page.write(question)
    page.press("Enter")


def answers(page: Page) -> Any:
    return page.value("[...document.querySelectorAll('.answer')].map(answer => answer.innerText)")


def test_everything_is_served_from_here_and_nothing_else_is_allowed() -> None:
    there = {file.name for file in Path(web_page.__file__).with_name("page").iterdir()} - {"index.html"}
    assert {route.path for route in ROUTES} == {"/", *(f"/page/{name}" for name in there)}
    with LiveServer(ScriptedEngine(), key="open sesame") as server, server.http() as http:
        for url in files(server.url):
            answer = http.get(url, headers={"authorization": ""})
            assert answer.status_code == 200
            assert "default-src 'self'" in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", answer.text)
            assert set(re.findall(r"https?://[\w.]*", answer.text)) <= {"http://www.w3.org"}
            assert not re.search(r"<script>|<style|style=|\son\w+=", answer.text)
            linked = re.findall(r'(?:src|href)="([^"]+)"|from "\./([^"]+)"', answer.text)
            assert {f"{server.url}/{page or f'page/{module}'}" for page, module in linked} <= {
                *files(server.url)
            }


@in_browser
@pytest.mark.usefixtures("drafters_stay")
def test_a_question_is_answered_and_its_trees_are_shown(
    browser: Browser, live: LiveServer, alone: Engine
) -> None:
    page = browser.open(live.url)
    asked(page, "w12 w13")
    page.wait(f"{IDLE} && document.querySelector('.answer')?.innerText")
    question = [{"role": "user", "content": "w12 w13"}]
    whole = alone.generate(question, SamplingParams(max_tokens=2**31 - 1), speculate=False)
    assert answers(page)[0].split() == whole.text.split()
    assert page.value("document.title") == f"{NAME} – offspec"
    lines = page.value(LINES)
    assert lines[0].startswith("    0    100%  ● ")
    told = page.value("document.getElementById('tree-caption').textContent")
    passes = int(re.match(r"pass (\d+) of \1: ", told)[1])  # type: ignore[index]
    page.value("document.getElementById('tree-earlier').focus()")
    page.press(" ")
    assert page.value("document.getElementById('tree-caption').textContent").startswith(
        f"pass {passes - 1} of {passes}: "
    )
    assert "tokens a pass" in page.value("document.getElementById('speed').textContent")
    assert page.value("document.querySelectorAll('#history-bars i').length") == passes
    assert not page.complaints()


@in_browser
def test_trees_are_drawn_as_in_the_terminal(browser: Browser, live: LiveServer) -> None:
    signs = ["\x1b[2J", "\u202eabc", "\u0301", "e\u0301", "天空", "🙂", "x" * 41, "\u200d", " a\tb\r\n", ""]
    odd = tree([-1, *range(len(signs))], ["a", *signs], [1.0, *[0.5] * len(signs)], [0], "")
    trees: list[TreeSeen] = [sentence(), chain(60), bush(300), odd]
    page = browser.open(live.url)
    for each, folded in product(trees, (True, False)):
        # A tie between two figures goes to the even one in Python, and up in JavaScript.
        seen = replace(each, probability=tuple(0.999 * chance for chance in each.probability))
        given = json.dumps(asdict(seen))
        drawn = page.value(
            f"import('/page/tree_drawing.js').then(m => [m.caption({given}, 2, 3),"
            f" m.draw({given}, {json.dumps(folded)}).map(line => line.map(span => span[1]).join(''))])"
        )
        expected = ["".join(span.text for span in line) for line in draw(seen, folded=folded)]
        assert drawn == [caption(seen, 2, 3), expected]


@in_browser
def test_esc_stops_an_answer_which_is_kept(browser: Browser) -> None:
    engine = ScriptedEngine([LONG, "It goes on."])
    engine.gate = Turnstile(3)
    with served(engine) as server:
        page = browser.open(server.url)
        asked(page, "Why?")
        page.wait("document.querySelector('.answer')?.innerText.includes('word8')")
        assert page.value("document.getElementById('send').textContent") == "Stop"
        page.press("Escape")
        page.wait(IDLE)
        server.wait_until_idle()
        engine.gate.set()
        assert page.value("document.querySelector('.end').textContent") == "stopped"
        kept = answers(page)[0]
        assert kept.startswith("word0") and not kept.endswith("word399")
        asked(page, "And?")
        page.wait(f"{IDLE} && document.querySelectorAll('.answer')[1]?.innerText")
        assert answers(page)[1] == "It goes on."
        prompt = engine.wording.spell(engine.asked[1].prompt)
        assert prompt == f"<|user|>Why?\n<|assistant|>{kept}\n<|user|>And?\n<|assistant|>"
        page.value("document.getElementById('new-button').click()")
        assert page.value("document.getElementById('messages').childElementCount") == 0


@in_browser
def test_a_question_stopped_before_its_answer_comes_back(browser: Browser) -> None:
    engine = ScriptedEngine([LONG])
    engine.gate.clear()
    with served(engine) as server:
        page = browser.open(server.url)
        page.wait(IDLE)
        page.write("one")
        page.press("Enter", shift=True)
        page.write("two")
        page.press("Enter")
        page.wait("document.getElementById('state').textContent.startsWith('reading')")
        page.value("document.getElementById('send').click()")
        page.wait(IDLE)
        engine.gate.set()
        server.wait_until_idle()
        assert page.value("document.getElementById('question').value") == "one\ntwo"
        assert page.value("document.querySelectorAll('article').length") == 0


@in_browser
def test_faults_are_told(browser: Browser) -> None:
    with served(ScriptedEngine([Script(LONG, fail_after=2)], context=500)) as server:
        page = browser.open(server.url)
        asked(page, LONG + LONG)
        page.wait("document.getElementById('error').textContent.includes('the prompt is too long')")
        assert page.value("document.getElementById('question').value") == LONG + LONG
        page.value("document.getElementById('question').value = ''")
        asked(page, "Why?")
        page.wait("document.getElementById('error').textContent.includes('the server\\'s log')")
        assert answers(page)[0].startswith("word0")


@in_browser
def test_a_key_is_asked_for(browser: Browser) -> None:
    with served(ScriptedEngine(), key="open sesame") as server:
        page = browser.open(server.url)
        page.wait(LOCKED)
        page.write("shut")
        page.press("Enter")
        page.wait("document.getElementById('error').textContent == 'That is not the key'")
        page.write("open sesame")
        page.press("Enter")
        page.wait(f"{IDLE} && document.activeElement.id == 'question'")
        asked(page, "Why?")
        page.wait(f"{IDLE} && document.querySelector('.answer')?.innerText == 'The sky is blue.'")
        page.go(server.url)
        page.wait(IDLE)


@in_browser
def test_loading_is_shown(browser: Browser) -> None:
    load = ScriptedLoad(ScriptedEngine(), told=reading(4)[:2])
    load.gate.clear()
    with LiveServer(lambda notify: load(EngineConfig(NAME), None, notify), ready=False) as server:
        page = browser.open(server.url)
        page.wait("document.getElementById('load-stage').textContent == 'reading the model 50%'")
        assert page.value("document.getElementById('load-progress').value") == 0.5
        assert page.value("document.getElementById('send').disabled")
        load.gate.set()
        page.wait(IDLE)
        assert page.value("document.getElementById('loading').hidden")


MARKDOWN = """# One *two*

Text with `code <b>`, **bold
and *more***, 2 * 3 * 4, a_b_c
and <img src=x onerror=alert(1)>.

- first
- second **x**
  - below
    1. deep

  still second
3. third
4. fourth

> said
> twice

```html
<script>alert("*1*")</script>

- none
```
~~~
open
"""
SHOWN = (
    "<h3>One <em>two</em></h3>"
    "<p>Text with <code>code &lt;b&gt;</code>, <strong>bold\nand <em>more</em></strong>, 2 * 3 * 4, a_b_c\n"
    "and &lt;img src=x onerror=alert(1)&gt;.</p>"
    "<ul><li>first</li><li>second <strong>x</strong><ul><li>below<ol><li>deep</li></ol></li></ul>"
    "still second</li></ul>"
    '<ol start="3"><li>third</li><li>fourth</li></ol>'
    "<blockquote><p>said\ntwice</p></blockquote>"
    '<pre tabindex="0"><code>&lt;script&gt;alert("*1*")&lt;/script&gt;\n\n- none</code></pre>'
    '<pre tabindex="0"><code>open\n</code></pre>'
)


@in_browser
def test_markdown_is_the_same_in_pieces_and_as_a_whole(browser: Browser, live: LiveServer) -> None:
    page = browser.open(live.url)
    shown = page.value(
        f"""import('/page/markdown.js').then(({{render}}) => {{
          const text = {json.dumps(MARKDOWN)};
          const [whole, grown] = [0, 0].map(() => document.createElement('div'));
          render(whole, text);
          for (let end = 0; end <= text.length; end++) render(grown, text.slice(0, end));
          return [whole.innerHTML.replaceAll(' start="1"', ''), whole.innerHTML == grown.innerHTML];
        }})"""
    )
    assert shown == [SHOWN, True]
    # No text is nested too deeply.
    for part in ("**", "``a ", "> ", "- ", "*a ", "1. ", "**a *b "):
        shown = page.value(
            f"""import('/page/markdown.js').then(({{render}}) => {{
              const element = document.createElement('p');
              render(element, {json.dumps(part * 2000 + "end")});
              return element.textContent;
            }})"""
        )
        assert shown.endswith("end")


@in_browser
def test_text_can_be_read_and_fits(browser: Browser) -> None:
    """In both colour schemes, on a wide and a narrow screen, with everything shown that there may be."""
    with served(ScriptedEngine([f"{'w' * 300} `code`\n\n```\n{'long ' * 60}\n```"])) as server:
        page = browser.open(server.url)
        asked(page, "Why? " * 60)
        page.wait(f"{IDLE} && document.querySelector('.answer pre')")
        page.value("document.getElementById('error').textContent = 'an error'")
        page.value("for (const id of ['key-form', 'loading']) document.getElementById(id).hidden = false")
        assert page.value("document.querySelectorAll('#tree-lines li').length") > 2
        for width, scheme in product((1280, 390), ("light", "dark")):
            page.look(width, 800, scheme)
            contrast, where = page.value(CONTRAST)
            assert contrast >= 4.5, where
            assert page.value(WIDTH) == width
            for part in ("messages", "passes"):
                assert page.value(f"(part => part.scrollWidth - part.clientWidth)({part})") == 0


@in_browser
def test_the_keyboard_reaches_everything(browser: Browser, live: LiveServer) -> None:
    page = browser.open(live.url, 390)
    page.wait(f"{IDLE} && document.activeElement.id == 'question'")
    page.value("document.getElementById('passes-button').focus()")
    page.press(" ")
    reached = []
    for _ in range(8):
        page.press("Tab")
        reached.append(page.value("document.activeElement.id"))
        assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    expected = "new-button messages tree-earlier tree-later tree-folded tree question send"
    assert reached == expected.split()
