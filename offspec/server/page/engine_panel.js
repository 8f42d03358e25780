// Panel with the engine's speed and the token tree of each pass. It is closed at first; the browser stores its state.

import { $ } from "./dom.js";
import { keepPlace } from "./messages.js";
import { Speed } from "./speed.js";
import { read, write } from "./storage.js";
import { Trees } from "./tree.js";

const KEY = "offspec-panel";

export class EnginePanel {
  constructor() {
    this.speed = new Speed();
    this.trees = new Trees();
    for (const id of ["panel-button", "panel-close"]) {
      $(id).addEventListener("click", () => {
        this.toggle(!this.isOpen);
        $("panel-button").focus();
        write(KEY, this.isOpen ? "open" : "closed");
      });
    }
    this.toggle(read(KEY) === "open");
    this.begin();
  }

  get isOpen() {
    return !$("panel").hidden;
  }

  toggle(open) {
    keepPlace(() => ($("panel").hidden = !open));
    $("panel-button").ariaExpanded = String(open);
    this.trees.show();
  }

  // Reset the activity and the speed at the start of an answer.
  begin() {
    this.now = {};
    this.speed.begin();
  }

  // Add the engine events of a chunk.
  add({ tree, pass, ...now }) {
    if (tree) this.trees.add(tree);
    if (pass) this.speed.add(pass);
    Object.assign(this.now, now);
  }

  // Return the engine's current activity, or "" if it is unknown.
  line() {
    return this.now.prefill || this.now.progress ? this.speed.line(this.now) : "";
  }
}
