// Drawing of a verified token tree as lines of text, like in `offspec chat`: the accepted path runs straight down,
// and rejected tokens branch off to the right.

const FEW = 2; // rejected siblings with their own line when the tree is folded
const LONGEST = 40; // maximum characters of a token
const SPELLED = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍" };

export const HEADING = "depth  chance  token";

const plural = (count, one, more) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

// Return the caption of a tree. place: number of its pass, from 1. count: number of passes.
export function caption(tree, place, count) {
  const bonus = tree.bonus ? " + 1 bonus" : ", end of the answer";
  const expected = tree.probability.reduce((sum, each) => sum + each, 0).toFixed(1);
  const nodes = plural(tree.parent.length, "node", "nodes");
  const accepted = `${tree.accepted.length - 1} accepted${bonus}`;
  return `pass ${place} of ${count}: ${nodes}, ${accepted}; expected by the draft: ${expected}`;
}

// Return the new text of a pass as [style, text]: accepted draft tokens, and the bonus token.
export function acceptedText(tree) {
  const accepted = tree.accepted.slice(1).map((node) => visible(tree.text[node])).join("");
  return [["accepted", accepted], ["bonus", tree.bonus && `★${visible(tree.bonus)}`]];
}

// Return a line for each node, as a list of [style, text]. folded: show only the most likely rejected tokens.
export function draw(tree, folded) {
  const drawing = new Drawing(tree, folded);
  const lines = [];
  const waiting = [{ node: 0, left: "", below: "" }];
  while (waiting.length) {
    const row = waiting.pop();
    if (Array.isArray(row)) {
      lines.push(row);
    } else {
      lines.push(drawing.line(row));
      waiting.push(...drawing.under(row).reverse());
    }
  }
  return lines;
}

class Drawing {
  constructor(tree, folded) {
    const count = tree.parent.length;
    this.tree = tree;
    this.folded = folded;
    this.path = new Set(tree.accepted);
    this.children = Array.from({ length: count }, () => []);
    this.depth = new Array(count).fill(0);
    this.size = new Array(count).fill(1);
    for (let node = 1; node < count; node++) {
      this.children[tree.parent[node]].push(node);
      this.depth[node] = this.depth[tree.parent[node]] + 1;
    }
    for (let node = count - 1; node > 0; node--) this.size[tree.parent[node]] += this.size[node];
    for (const siblings of this.children) siblings.sort((a, b) => tree.probability[b] - tree.probability[a]);
  }

  line({ node, left }) {
    const [sign, style] = this.path.has(node) ? ["●", "accepted"] : ["○", "rejected"];
    const spans = [
      ...margin(this.depth[node], percent(this.tree.probability[node])),
      ...branches(left),
      [style, `${sign} ${visible(this.tree.text[node])}`],
    ];
    const hidden = this.size[node] - 1;
    if (!this.folded || style === "accepted" || !hidden) return spans;
    return [...spans, ["branch", `  ▸ ${hidden.toLocaleString("en")} more`]];
  }

  // Return the rows below a node's line, from the top: branches, a line for folded ones, and the continuation.
  under({ node, below }) {
    const accepted = this.path.has(node);
    if (this.folded && !accepted) return [];
    const onward = this.onward(node);
    const others = this.children[node].filter((child) => child !== onward);
    const shown = this.folded && others.length > FEW + 1 ? others.slice(0, FEW) : others;
    const rows = shown.map((child) => ({ node: child, left: `${below}├─`, below: `${below}│ ` }));
    const rest = others.slice(shown.length);
    if (rest.length) rows.push(this.rest(node, below, rest));
    if (onward !== undefined) {
      rows.push({ node: onward, left: below, below });
    } else if (accepted && this.tree.bonus) {
      rows.push([...margin(this.depth[node] + 1, "bonus"), ["bonus", `★ ${visible(this.tree.bonus)}`]]);
    }
    return rows;
  }

  // Return the child that continues a node's column: the accepted child, or else the most likely one.
  onward(node) {
    const children = this.children[node];
    return this.path.has(node) ? children.find((child) => this.path.has(child)) : children[0];
  }

  rest(node, below, rest) {
    const nodes = rest.reduce((sum, child) => sum + this.size[child], 0);
    const inside = nodes > rest.length ? `, ${nodes.toLocaleString("en")} nodes` : "";
    return [
      ...margin(this.depth[node] + 1, `≤${percent(this.tree.probability[rest[0]])}`),
      ...branches(`${below}├─`),
      ["branch", `▸ ${plural(rest.length, "more token", "more tokens")}${inside}`],
    ];
  }
}

const margin = (depth, chance) => [
  ["branch", `${String(depth).padStart(5)}  `],
  ["probability", `${chance.padStart(6)}  `],
];

// Return the branch lines left of a node; the outermost line is the accepted path.
const branches = (left) =>
  left ? [["accepted", left[0] === "├" ? "┠" : "┃"], ["branch", left.slice(1)]] : [];

function percent(probability) {
  const share = 100 * Math.min(Math.max(probability, 0), 1);
  return `${share.toFixed(share >= 9.95 ? 0 : 1)}%`;
}

// Return a token's text on one line, with visible signs for spaces, line ends, controls and combining marks.
function visible(text) {
  if (!text) return "(no text)";
  const signs = [...text].map((character, place) => sign(character, place === 0)).join("");
  return [...signs].length <= LONGEST ? signs : `${[...signs].slice(0, LONGEST - 1).join("")}…`;
}

function sign(character, first) {
  if (character in SPELLED) return SPELLED[character];
  if (/[\p{C}\p{Z}\ufe00-\ufe0f]/u.test(character)) return escaped(character.codePointAt(0).toString(16));
  return first && /[\p{Mn}\p{Me}]/u.test(character) ? `◌${character}` : character;
}

function escaped(digits) {
  if (digits.length <= 2) return `\\x${digits.padStart(2, "0")}`;
  return digits.length <= 4 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}
