// Messages as articles, and where the reader is among them.

import { $, button, make } from "./dom.js";
import { Markdown } from "./markdown.js";

// An answer that grows is drawn every 33 milliseconds; slow drawing takes a quarter of the time.
const EVERY = 33;
const SHARE = 3;

// An article for a message; those of answers have `begin`, `update` and `finish`.
export function article(message) {
  return message.role === "user" ? new Question(message) : new Answer(message);
}

class Question {
  constructor(message) {
    const below = actions(button("Edit", "edit", "Edit message"));
    this.element = make("article", [make("p", [message.content]), below], "user");
    this.element.ariaLabel = "You";
  }
}

class Answer {
  constructor(message) {
    this.message = message;
    this.thought = make("div");
    this.thinking = make("details", [make("summary", ["Thinking"]), this.thought]);
    this.text = make("div", [], "answer");
    this.markdown = new Markdown(this.text);
    this.note = make("span", [], "note");
    const copy = button("Copy", "copy", "Copy answer");
    const regenerate = button("Regenerate", "regenerate", "Regenerate answer");
    const below = actions(copy, regenerate, this.note);
    this.element = make("article", [this.thinking, this.text, below], "assistant");
    this.element.ariaLabel = "Answer";
    this.draw();
  }

  // Busy, so that it is read out when it is complete.
  begin() {
    this.element.ariaBusy = "true";
  }

  update() {
    this.timer ??= setTimeout(() => keepPlace(() => this.draw()), Math.max(EVERY, SHARE * this.took));
  }

  finish() {
    clearTimeout(this.timer);
    this.element.ariaBusy = "false";
    keepPlace(() => this.draw());
  }

  draw() {
    const began = performance.now();
    this.timer = null;
    this.markdown.show(this.message.content);
    this.thought.textContent = this.message.thought ?? "";
    this.thinking.hidden = !this.message.thought;
    this.note.textContent = this.message.note ?? "";
    this.took = performance.now() - began;
  }
}

const actions = (...buttons) => make("div", buttons, "actions");

// Change what is shown. A reader at the end stays at the end.
export function keepPlace(change) {
  const box = $("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// Put a form in place of a question. send: called with the new text; cancel: called to take the form away.
export function edit(element, text, send, cancel) {
  const area = make("textarea", [text]);
  area.ariaLabel = "Your message";
  const buttons = [button("Cancel", "cancel"), make("button", ["Send"])];
  const form = make("form", [area, make("div", buttons, "buttons")], "edit");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) send(area.value.trim());
  });
  buttons[0].addEventListener("click", cancel);
  sendOnEnter(area, form);
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    cancel();
  });
  element.replaceChildren(form);
  area.focus();
  area.setSelectionRange(text.length, text.length);
}

// Enter sends, Shift+Enter begins a line.
export function sendOnEnter(area, form) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
}
