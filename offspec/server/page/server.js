// State of the server: loading progress, API key and errors.

import { Refused, checkKey, health, setKey } from "./api.js";
import { $ } from "./dom.js";

const EVERY = 1000; // milliseconds
const STATES = { ready: "", loading: "", unreachable: "The server does not respond" };

export class Server {
  // changed: called when `ready` or `model` may have changed.
  constructor(changed) {
    this.model = "";
    this.ready = false;
    this.changed = changed;
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      setKey($("key").value.trim());
      $("key").value = $("error").textContent = "";
      this.tryKey().then(() => this.ready && $("question").focus());
    });
  }

  async wait() {
    this.setReady(false);
    for (;;) {
      const state = await health();
      this.model = state.model ?? this.model;
      showLoading(state);
      this.changed();
      if (state.status === "ready") return this.tryKey();
      await new Promise((done) => setTimeout(done, EVERY));
    }
  }

  async tryKey() {
    try {
      await checkKey();
      $("key-form").hidden = true;
      this.setReady(true);
    } catch (error) {
      this.failed(error);
    }
  }

  setReady(ready) {
    this.ready = ready;
    this.changed();
  }

  // Show why a request failed. If the server or a valid key is missing, wait for it.
  failed(error) {
    if (!(error instanceof Refused)) console.error(error);
    if (error.status === 401) {
      this.setReady(false);
      $("error").textContent = $("key-form").hidden ? "" : "This is not the server's key";
      $("key-form").hidden = false;
      $("key").focus();
      return;
    }
    $("error").textContent = error.message;
    if (error.status === 0 || error.status === 503) this.wait();
  }
}

function showLoading({ status, stage, detail, done, total }) {
  $("loading").hidden = status !== "loading";
  $("state").textContent = STATES[status] ?? status;
  if (status !== "loading") return;
  const percent = total ? ` ${Math.floor((100 * done) / total)}%` : "";
  $("load-stage").textContent = `${stage}${detail ? `, ${detail}` : ""}${percent}`;
  if (total) $("load-progress").value = done / total;
  else $("load-progress").removeAttribute("value");
}
