"""Markdown on the page: growing text, and answers that try to run or load something."""

import json

from tests.support.browser import Browser
from tests.support.chat_page import IDLE, ask, element, in_browser, served
from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import LiveServer

MARKDOWN = """# One *two*

Text with `code <b>`, **bold
and *more***, 2 * 3 * 4, a_b_c &lt;
and <img src=x onerror=alert(1)>.

- first
- second **x**
  - below
    1. deep

  still second
3. third
4. fourth

> quoted
> twice

| a | b |
|---|--:|
| 1<br>2 | [c](https://a.b/c?d=e&f) |

See https://a.b/c. And [later].

```html title
<script>alert("*1*")</script>

- none
```

[later]: mailto:a@b.c
~~~
open
"""
SHOWN = (
    "<h3>One <em>two</em></h3>"
    "<p>Text with <code>code &lt;b&gt;</code>, <strong>bold<br>and <em>more</em></strong>, "
    "2 * 3 * 4, a_b_c &lt;<br>and &lt;img src=x onerror=alert(1)&gt;.</p>"
    "<ul><li><p>first</p></li><li><p>second <strong>x</strong></p>"
    "<ul><li>below<ol><li>deep</li></ol></li></ul>"
    "<p>still second</p></li></ul>"
    '<ol start="3"><li>third</li><li>fourth</li></ol>'
    "<blockquote><p>quoted<br>twice</p></blockquote>"
    '<div class="table" tabindex="0"><table>'
    '<thead><tr><th>a</th><th style="text-align: right;">b</th></tr></thead>'
    '<tbody><tr><td>1<br>2</td><td style="text-align: right;">[https://a.b/c?d=e&amp;f c]</td></tr></tbody>'
    "</table></div>"
    "<p>See [https://a.b/c https://a.b/c]. And [mailto:a@b.c later].</p>"
    '<div class="code">{html}<pre tabindex="0"><code>'
    '&lt;script&gt;alert("*1*")&lt;/script&gt;\n\n- none</code></pre></div>'
    '<div class="code">{}<pre tabindex="0"><code>open</code></pre></div>'
)
# Rendered HTML, shortened: links are [address text], heads of code blocks {language}.
DRAWN = """const drawn = element => {
  const copy = element.cloneNode(true);
  for (const link of copy.querySelectorAll('a')) {
    if (link.rel != 'noopener noreferrer' || link.target != '_blank') throw Error(link.outerHTML);
    link.replaceWith(`[${link.getAttribute('href')} ${link.textContent}]`);
  }
  for (const head of copy.querySelectorAll('.code-head'))
    head.replaceWith(`{${head.querySelector('span').textContent}}`);
  return copy.innerHTML;
};"""
ALL = "[...document.querySelectorAll('.answer *')]"
HOSTILE = """<script>alert(1)</script> <img src=x onerror=alert(1)> <svg/onload=alert(1)>

<iframe src="javascript:alert(1)"></iframe>

![picture](https://elsewhere.example/x.png) ![](https://elsewhere.example/y.png)
![a](data:image/png;base64,AAAA)

[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](java&#115;cript:alert(1)) [d](data:text/html,x)
[e](vbscript:x)
[f](file:///etc/passwd) [g](/v1/models) [h](#x) [i](//elsewhere.example) [j](blob:x)
<javascript:alert(1)> [k](ftp://x)

[l]: javascript:alert(1)
[l] [m](https://good.example "\\" onmouseover=alert(1)") <https://good.example/"onclick=alert(1)>

| <style>*{display:none}</style> | [n](javascript:alert(1)) |
|---|---|
| <br onclick=alert(1)> | <a href="javascript:alert(1)">o</a> |

```"><script>alert(1)</script>
</code></pre><script>alert(1)</script>
```
"""


@in_browser
def test_streamed_markdown_equals_whole_markdown(browser: Browser, live: LiveServer) -> None:
    page = browser.open(live.url)
    shown, differs, kept = page.value(
        f"""import('/page/markdown.js').then(({{Markdown}}) => {{
          {DRAWN}
          const whole = text => {{
            const element = document.createElement('div');
            new Markdown(element).show(text);
            return drawn(element);
          }};
          const text = {json.dumps(MARKDOWN)};
          const element = document.createElement('div');
          const grown = new Markdown(element);
          const differs = [];
          for (let end = 0; end <= text.length; end++) {{
            grown.show(text.slice(0, end));
            if (drawn(element) != whole(text.slice(0, end))) differs.push(text.slice(0, end));
          }}
          // Blocks before the last two are not drawn again.
          const blocks = 'one\\n\\n- two\\n\\n## three\\n\\nfour\\n\\nfi';
          const steady = document.createElement('div');
          const growing = new Markdown(steady);
          growing.show(blocks);
          const before = [...steady.childNodes];
          growing.show(blocks + 've\\n\\nsix');
          return [whole(text), differs, before.map(each => steady.contains(each))];
        }})"""
    )
    assert shown == SHOWN
    assert differs == []
    assert kept == [True, True, True, False, False]


@in_browser
def test_deep_and_long_texts_are_rendered(browser: Browser, live: LiveServer) -> None:
    page = browser.open(live.url)
    for part in ("**", "``a ", "> ", "- ", "*a ", "1. ", "**a *b ", "[", "![a](", "|a", "&amp;", "word\n\n"):
        assert page.value(
            f"""import('/page/markdown.js').then(({{Markdown}}) => {{
              const element = document.createElement('div');
              new Markdown(element).show({json.dumps(part * 2000)});
              return element.childNodes.length > 0;
            }})"""
        )


@in_browser
def test_answers_cannot_run_or_load_anything(browser: Browser) -> None:
    with served(ScriptedEngine([HOSTILE])) as server:
        page = browser.open(server.url)
        page.call("Network.enable")
        page.value("window.alert = text => { window.ran = text }")
        ask(page, "Why?")
        page.wait(f"{IDLE} && {element('.answer pre')}")
        tags = page.value(f"[...new Set({ALL}.map(each => each.localName))]")
        expected = "a br button code div p pre span table tbody td th thead tr"
        assert {*tags} == {*expected.split()}
        links = page.value("[...document.querySelectorAll('.answer a')].map(link => link.href)")
        assert {*links} == {
            "https://elsewhere.example/x.png",
            "https://elsewhere.example/y.png",
            "https://good.example/",
            "https://good.example/%22onclick=alert(1)",
        }
        names = page.value(f"[...new Set({ALL}.flatMap(each => each.getAttributeNames()))]")
        expected = "aria-label class data-action href rel tabindex target type"
        assert {*names} == {*expected.split()}
        assert page.value("window.ran ?? null") is None
        for event in browser.events:
            if event["method"] == "Network.requestWillBeSent":
                assert event["params"]["request"]["url"].startswith(server.url)
        assert not page.errors()
