// Token trees of the latest passes. One is shown; if it is the latest, each new tree replaces it.

import { $, make } from "./dom.js";
import { HEADING, acceptedText, caption, draw } from "./tree_drawing.js";

const KEPT = 120; // number of trees
const ALOUD = { "●": "accepted", "○": "rejected", "★": "bonus", "▸": "folded" };

export class Trees {
  constructor() {
    this.trees = [];
    this.at = -1;
    $("tree-heading").textContent = HEADING;
    $("tree-earlier").addEventListener("click", () => this.go(-1));
    $("tree-later").addEventListener("click", () => this.go(1));
    $("tree-folded").addEventListener("change", () => this.show());
  }

  add(tree) {
    const follows = this.at === this.trees.length - 1;
    this.trees.push(tree);
    if (this.trees.length > KEPT) {
      this.trees.shift();
      this.at = Math.max(this.at - 1, 0);
    }
    if (follows) this.at = this.trees.length - 1;
    this.show();
  }

  go(passes) {
    const at = Math.max(0, Math.min(this.at + passes, this.trees.length - 1));
    if (at === this.at) return;
    this.at = at;
    $("tree").scrollTo(0, 0);
    this.show();
  }

  // Draw the current tree if the panel is open.
  show() {
    const tree = this.trees[this.at];
    if (!tree || $("panel").hidden) return;
    $("tree-earlier").ariaDisabled = String(this.at === 0);
    $("tree-later").ariaDisabled = String(this.at === this.trees.length - 1);
    $("tree-caption").textContent = caption(tree, this.at + 1, this.trees.length);
    $("tree-text").replaceChildren("text  ", ...acceptedText(tree).map(span));
    const lines = draw(tree, $("tree-folded").checked);
    $("tree-lines").replaceChildren(...lines.map((line) => make("li", line.flatMap(spans))));
  }
}

function span([style, text]) {
  const element = make("span", [text]);
  element.className = style;
  return element;
}

// Return the spans of a line. For screen readers, signs are replaced by words and branch lines are hidden.
function spans([style, text]) {
  const [sign] = text.trimStart();
  if (!(sign in ALOUD)) {
    const element = span([style, text]);
    element.ariaHidden = style === "branch" || style === "accepted" ? "true" : null;
    return [element];
  }
  const at = text.indexOf(sign) + 1;
  const spoken = span([style, text.slice(0, at)]);
  spoken.role = "img";
  spoken.ariaLabel = ALOUD[sign];
  return [spoken, span([style, text.slice(at)])];
}
