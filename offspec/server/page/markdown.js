// Markdown to elements. Text only ever becomes text nodes, so nothing in an answer can become markup.

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^( {0,3}(?:[-*+]|\d{1,9}[.)])) +/;
const QUOTE = /^ {0,3}> ?/;
const DEEPEST = 8; // levels of lists and quotes; what is deeper is a paragraph
const INLINE = /(`+)(?!`)([^]*?[^`])\1(?!`)|\*\*(?=\S)([^]*?\S)\*\*(?!\*)|\*(?=[^\s*])([^*]*[^\s*])\*/;

// Make an element show a text. Blocks whose source is the same as before stay as they are.
export function render(element, text) {
  const blocks = split(text.split("\n"), 0);
  const kept = element.blocks ?? [];
  let same = 0;
  while (same < blocks.length && blocks[same].source === kept[same]) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map((block) => block.make()));
  element.blocks = blocks.map((block) => block.source);
}

// The blocks of some lines: their source, and what makes an element of each.
function split(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const [end, make] = block(lines, at, depth);
    const own = lines.slice(at, end);
    blocks.push({ source: own.join("\n"), make: () => make(own) });
    at = end;
  }
  return blocks;
}

// Where the block that begins at a line ends, and what makes its element of its lines.
function block(lines, at, depth) {
  const fence = FENCE.exec(lines[at]);
  if (fence) {
    const closed = (line) =>
      FENCE.exec(line)?.[1].startsWith(fence[1]) && !line.replaceAll(fence[1][0], "").trim();
    let end = at + 1;
    while (end < lines.length && !closed(lines[end])) end++;
    return [Math.min(end + 1, lines.length), (own) => code(own.slice(1, end - at))];
  }
  const heading = HEADING.exec(lines[at]);
  if (heading) {
    const level = Math.min(heading[1].length + 2, 6); // the page itself has the first two
    return [at + 1, () => make(`h${level}`, inline(heading[2]))];
  }
  if (depth < DEEPEST && QUOTE.test(lines[at])) {
    const end = until(lines, at, (line) => !QUOTE.test(line));
    return [end, (own) => make("blockquote", nested(own.map((line) => line.replace(QUOTE, "")), depth))];
  }
  if (depth < DEEPEST && ITEM.test(lines[at])) return [endOfList(lines, at), (own) => list(own, depth)];
  const begins = (line) => FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line);
  const end = until(lines, at, (line) => !line.trim() || (depth < DEEPEST && begins(line)));
  return [end, (own) => make("p", inline(own.map((line) => line.trim()).join("\n")))];
}

function until(lines, at, ends) {
  let end = at + 1;
  while (end < lines.length && !ends(lines[end])) end++;
  return end;
}

const ordered = (line) => /^ *\d/.test(line);

// A list goes on with items of its kind and with what is indented below them, also behind an empty line.
function endOfList(lines, at) {
  const goesOn = (line) => /^ {2,}\S/.test(line) || (ITEM.test(line) && ordered(line) === ordered(lines[at]));
  const ends = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line);
  let end = at + 1;
  for (let next = end; next < lines.length; next++) {
    if (!lines[next].trim()) continue;
    if (!goesOn(lines[next]) && (next > end || ends(lines[next]))) break;
    end = next + 1;
  }
  return end;
}

function list(lines, depth) {
  const items = [];
  const left = lines[0].search(/\S/);
  let indent = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    const own = line.search(/\S|$/);
    if (item && own < left + 2) {
      indent = item[0].length;
      items.push([line.slice(indent)]);
    } else {
      items.at(-1).push(line.slice(Math.min(own, indent)));
    }
  }
  const element = make(ordered(lines[0]) ? "ol" : "ul", items.map((item) => make("li", tight(item, depth))));
  if (element.localName === "ol") element.start = parseInt(lines[0], 10);
  return element;
}

// What an item holds: text that is one paragraph stands in it by itself.
function tight(lines, depth) {
  const elements = nested(lines, depth);
  return elements.flatMap((element) => (element.localName === "p" ? [...element.childNodes] : [element]));
}

const nested = (lines, depth) => split(lines, depth + 1).map((block) => block.make());

function code(lines) {
  const pre = make("pre", [make("code", [lines.join("\n")])]);
  pre.tabIndex = 0; // long lines scroll, with the keyboard too
  return pre;
}

// Code, bold and italic inside a line.
function inline(text) {
  const parts = [];
  let found;
  while ((found = INLINE.exec(text))) {
    parts.push(text.slice(0, found.index));
    if (found[1]) parts.push(make("code", [found[2].replace(/^ (.*) $/s, "$1")]));
    else if (found[3]) parts.push(make("strong", inline(found[3])));
    else parts.push(make("em", inline(found[4])));
    text = text.slice(found.index + found[0].length);
  }
  parts.push(text);
  return parts;
}

export function make(name, children = []) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}
