// Speed and time split of passes, from their statistics.

import { $, make } from "./dom.js";

const SHOWN = 60; // number of passes in the history

export class Speed {
  constructor() {
    this.history = [];
    this.begin();
  }

  // Reset the speed at the start of an answer. The history of passes is kept.
  begin() {
    this.tokens = this.passes = this.seconds = this.usual = 0;
  }

  add(pass) {
    this.usual = pass.draft_seconds + pass.target_seconds;
    this.tokens += pass.emitted;
    this.passes += 1;
    this.seconds += this.usual;
    this.history = [...this.history, pass.emitted].slice(-SHOWN);
    this.last = [pass.draft_seconds, pass.wait_seconds, pass.compute_seconds];
    this.show();
  }

  show() {
    if (!this.last || !this.passes) return;
    const rate = this.seconds ? this.tokens / this.seconds : 0;
    $("speed").textContent = `${figure(rate)} tok/s · ${figure(this.tokens / this.passes)} tokens per pass`;
    this.showSplit();
    const most = Math.max(...this.history, 1);
    $("history-bars").replaceChildren(...this.history.map((count) => bar(count / most)));
    const least = Math.min(...this.history);
    $("history").textContent = `${least} to ${Math.max(...this.history)}, latest ${this.history.at(-1)}`;
  }

  showSplit() {
    const total = this.last.reduce((sum, part) => sum + part, 0) || 1;
    this.last.forEach((part, at) => {
      $("split-bar").children[at].style.width = `${(100 * part) / total}%`;
      const [, seconds, share] = $("split").rows[at].cells;
      seconds.textContent = duration(part);
      share.textContent = `${Math.round((100 * part) / total)}%`;
    });
  }

  // Return the engine's current activity, from its events `prefill` and `progress`.
  line({ prefill, progress }) {
    const parts = [];
    if (prefill && (!progress || progress.index === 1)) {
      const cached = prefill.reused ? `, ${prefill.reused.toLocaleString("en")} from the cache` : "";
      parts.push(`reading ${prefill.tokens.toLocaleString("en")} tokens${cached}`);
    } else if (progress?.nodes) {
      parts.push(`tree of ${progress.nodes.toLocaleString("en")}`);
    }
    if (progress?.layer) parts.push(`layer ${progress.layer}/${progress.layers}`);
    else if (progress && !progress.nodes && progress.index > 1) parts.push("drafting");
    if (this.usual > 2) parts.push(`${duration(this.usual)} per pass`);
    return parts.join(" · ");
  }
}

function bar(share) {
  const element = make("i");
  element.style.height = `${100 * share}%`;
  return element;
}

const figure = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

export function duration(seconds) {
  if (seconds < 120) return seconds && seconds < 1 ? `${figure(1000 * seconds)} ms` : `${figure(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
