// Messages as article elements, and the scroll position among them.

import { $, button, make } from "./dom.js";
import { Markdown } from "./markdown.js";

const EVERY = 33; // milliseconds between redraws of a growing answer
const SHARE = 3; // minimum pause between redraws, in multiples of the drawing time

// Return the article of a message. Articles of answers have `begin`, `update` and `finish`.
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

  // Mark the article as busy, so that screen readers read it when it is complete.
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

// Make a change to the conversation. If it is scrolled to the end, it stays there.
export function keepPlace(change) {
  const box = $("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// Replace a question by a form. send: called with the new text. cancel: called to remove the form.
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

// Submit a form on Enter; Shift+Enter starts a new line.
export function sendOnEnter(area, form) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
}
