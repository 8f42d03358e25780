// Conversion of Markdown to elements, from the tokens of markdown-it. Text becomes text nodes only, never HTML.

import { button, make } from "./dom.js";
import MarkdownIt from "./markdown-it.min.mjs";

const PROTOCOLS = /^(https?|mailto):/i;
const BREAK = /<br\s*\/?>/i; // the only supported tag, because tables have no other line break

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

// Element that shows a growing text. When text is added, only the last two blocks are parsed and drawn again: the
// incomplete line is part of the last block, which may still merge with the one before.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.done = 0; // number of characters that are final
    this.elements = 0; // number of elements that are final
    this.whole = false; // whether all text must be parsed each time
  }

  show(text) {
    let blocks = this.parse(text);
    if (this.whole && this.done) {
      this.done = this.elements = 0;
      blocks = this.parse(text);
    }
    while (this.element.childNodes.length > this.elements) this.element.lastChild.remove();
    for (const block of blocks) this.element.append(...build(block));
    if (this.whole || blocks.length < 3) return;
    const line = blocks.at(-2)[0].map[0];
    this.done += startOfLine(text.slice(this.done), line);
    this.elements += blocks.length - 2;
  }

  // Return the tokens of each block after `done`. A link definition also affects earlier blocks, so the whole text
  // is then parsed.
  parse(text) {
    const found = {};
    const blocks = [];
    for (const token of parser.parse(text.slice(this.done), found)) {
      if (token.level === 0 && token.nesting >= 0) blocks.push([]);
      blocks.at(-1).push(token);
    }
    this.whole ||= Boolean(found.references);
    return blocks;
  }
}

function startOfLine(text, line) {
  const ends = /\r\n?|\n/g;
  for (let at = 0; at < line; at++) ends.exec(text);
  return ends.lastIndex;
}

function build(tokens) {
  const root = make("div");
  const open = [root];
  for (const token of tokens) {
    if (token.nesting < 0) {
      open.pop();
    } else if (token.nesting > 0) {
      const [outer, inner] = token.hidden ? [null, open.at(-1)] : container(token);
      if (outer) open.at(-1).append(outer);
      open.push(inner);
    } else {
      open.at(-1).append(...leaf(token));
    }
  }
  return [...root.childNodes];
}

// Return the element to insert, and the element for the content.
function container(token) {
  if (token.type === "table_open") {
    const table = make("table");
    return [scrolled("div", [table], "table"), table];
  }
  if (token.type === "heading_open") return twice(make(`h${Math.min(Number(token.tag[1]) + 2, 6)}`));
  if (token.type === "link_open") return twice(link(token.attrGet("href")));
  const element = make(token.tag);
  if (token.attrGet("start")) element.start = token.attrGet("start");
  const [align] = /left|center|right/.exec(token.attrGet("style")) ?? [];
  if (align) element.style.textAlign = align;
  return twice(element);
}

const twice = (element) => [element, element];

function leaf(token) {
  switch (token.type) {
    case "inline":
      return build(token.children);
    case "text":
      return token.content.split(BREAK).flatMap((part, at) => (at ? [make("br"), part] : [part]));
    case "softbreak":
    case "hardbreak":
      return [make("br")];
    case "code_inline":
      return [make("code", [token.content])];
    case "image": // a link, because images are not loaded
      return [link(token.attrGet("src"), [token.content || token.attrGet("src")])];
    case "fence":
    case "code_block":
      return [code(token.content, token.info.trim().split(/\s/)[0])];
    case "hr":
      return [make("hr")];
    default:
      return [token.content];
  }
}

function link(url, children = []) {
  if (!PROTOCOLS.test(url)) return make("span", children);
  const element = make("a", children);
  element.href = url;
  element.rel = "noopener noreferrer";
  element.target = "_blank";
  return element;
}

function code(text, language) {
  const head = make("div", [make("span", [language]), button("Copy", "copy-code", "Copy code")], "code-head");
  return make("div", [head, scrolled("pre", [make("code", [text.replace(/\n$/, "")])])], "code");
}

// Create an element whose wide content can be scrolled, also with the keyboard.
function scrolled(name, children, className) {
  const element = make(name, children, className);
  element.tabIndex = 0;
  return element;
}
