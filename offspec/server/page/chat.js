// The open conversation: questions, streamed answers, edits, and stopping.

import { answer } from "./api.js";
import { copy } from "./clipboard.js";
import * as conversations from "./conversations.js";
import { $ } from "./dom.js";
import { article, edit } from "./messages.js";
import * as settings from "./settings.js";
import { duration } from "./speed.js";
import { read, write } from "./storage.js";

const OPEN = "offspec-open"; // id of this tab's conversation
const ENDS = { stop: "", stopped: "stopped", length: "truncated: token limit reached or context full" };
const SAME = "same as before (for another answer, set a temperature and no seed in Settings)";
const NOT_STORED = "The browser's storage is full or blocked: this conversation ends with the page";

export class Chat {
  // server: state of the server. panel: engine panel. changed: called when an answer begins or ends.
  constructor(server, panel, changed) {
    Object.assign(this, { server, panel, changed });
    this.running = null; // AbortController of the current answer
    this.done = Promise.resolve();
    this.articles = []; // articles of the messages in `shown`
    this.shown = [];
    const actions = {
      copy: (at, button) => copy(this.conversation.messages[at].content, button),
      "copy-code": (at, button) => copy(button.closest(".code").querySelector("code").textContent, button),
      regenerate: (at) => this.answer(this.conversation.messages.slice(0, at)),
      edit: (at) => this.edit(at),
    };
    $("messages").addEventListener("click", ({ target }) => {
      const at = this.articles.findIndex(({ element }) => element.contains(target));
      actions[target.dataset.action]?.(at, target);
    });
    document.addEventListener("visibilitychange", () => this.message?.content && this.store());
    this.open(conversations.load(read(OPEN, "sessionStorage")) ?? conversations.empty());
  }

  async open(conversation) {
    await this.stop();
    const messages = [...conversation.messages];
    const unanswered = messages.length % 2 ? messages.pop().content : "";
    $("question").value ||= unanswered;
    this.show({ ...conversation, messages });
    write(OPEN, conversation.id, "sessionStorage");
    $("error").textContent = "";
    $("messages").scrollTop = $("messages").scrollHeight;
  }

  // Show a conversation, keeping the articles of the messages at its start that are shown already.
  show(conversation) {
    this.conversation = conversation;
    const { messages } = conversation;
    let same = 0;
    while (same < messages.length && messages[same] === this.shown[same]) same++;
    for (const { element } of this.articles.splice(same)) element.remove();
    this.articles.push(...messages.slice(same).map(article));
    $("messages").append(...this.articles.slice(same).map(({ element }) => element));
    this.shown = messages;
    $("start").hidden = messages.length > 0;
  }

  store() {
    if (conversations.save(this.conversation) || this.warned) return;
    this.warned = true;
    $("error").textContent ||= NOT_STORED;
  }

  async stop() {
    this.running?.abort();
    await this.done;
  }

  ask(text) {
    this.answer([...this.conversation.messages, { role: "user", content: text }]);
  }

  edit(at) {
    const { messages } = this.conversation;
    const { element } = this.articles[at];
    const cancel = () => {
      this.articles[at] = article(messages[at]);
      element.replaceWith(this.articles[at].element);
      this.articles[at].element.querySelector("button").focus();
    };
    const send = (content) => this.answer([...messages.slice(0, at), { role: "user", content }]);
    edit(element, messages[at].content, send, cancel);
  }

  async answer(messages) {
    await this.stop();
    if (!this.server.ready) return;
    this.done = this.run(messages);
    await this.done;
  }

  async run(messages) {
    const before = this.conversation;
    const end = { reason: "", usage: null };
    this.begin(messages);
    try {
      const chunks = answer(this.request(messages), this.running.signal);
      for await (const chunk of chunks) this.add(chunk, end);
    } catch (error) {
      end.reason = reasonOf(error);
      if (end.reason !== "stopped") this.server.failed(error);
    }
    clearInterval(this.timer);
    if (this.message.content || this.message.thought || end.reason === "stop") {
      this.message.note = this.note(end, before.messages[messages.length]);
      this.articles.at(-1).finish();
      this.store();
    } else {
      this.restore(before, messages, end);
    }
    this.running = this.message = null;
    $("state").textContent = "";
    if (document.activeElement === document.body) $("messages").focus();
    this.changed();
  }

  begin(messages) {
    $("error").textContent = "";
    this.message = { role: "assistant", content: "", thought: "" };
    this.running = new AbortController();
    this.began = performance.now();
    this.show({ ...this.conversation, messages });
    this.store(); // the page may be closed before the answer arrives
    this.show({ ...this.conversation, messages: [...messages, this.message] });
    this.articles.at(-1).begin();
    $("messages").scrollTop = $("messages").scrollHeight;
    this.panel.begin();
    this.timer = setInterval(() => this.showState(), 1000);
    this.showState();
    this.changed();
  }

  request(messages) {
    const system = settings.system();
    const chat = messages.map(({ role, content }) => ({ role, content }));
    return {
      model: this.server.model,
      messages: system ? [{ role: "system", content: system }, ...chat] : chat,
      ...settings.sampling(),
      ...(this.panel.isOpen && { offspec: { trees: true } }),
    };
  }

  add(chunk, end) {
    for (const { delta, finish_reason } of chunk.choices) {
      this.message.content += delta.content ?? "";
      this.message.thought += delta.reasoning_content ?? "";
      end.reason = finish_reason ?? end.reason;
    }
    end.usage = chunk.usage ?? end.usage;
    if (chunk.offspec) {
      this.panel.add(chunk.offspec);
      this.showState();
    }
    this.articles.at(-1).update();
  }

  showState() {
    const activity = this.message.content ? "answering" : "waiting";
    $("state").textContent = this.panel.line() || `${activity} · ${duration(Math.round(this.seconds()))}`;
  }

  seconds() {
    return (performance.now() - this.began) / 1000;
  }

  // Return the text below an answer. replaced: the previous answer to the same question, if any.
  note({ reason, usage }, replaced) {
    const tokens = usage?.completion_tokens.toLocaleString("en");
    return [
      ENDS[reason] ?? "aborted",
      this.message.content ? "" : "no text",
      tokens ? `${tokens} tokens in ${duration(this.seconds())}` : "",
      reason === "stop" && replaced?.content === this.message.content ? SAME : "",
    ]
      .filter(Boolean)
      .join(" · ");
  }

  // Show the previous conversation after an answer without text, and put a new question back into its field. If the
  // connection was lost, as when the page is closed, the question stays stored.
  restore(before, messages, { reason }) {
    const question = messages.at(-1);
    if (!before.messages.includes(question)) $("question").value ||= question.content;
    this.show(before);
    if (reason === "lost") return;
    if (before.messages.length) this.store();
    else conversations.remove(before.id);
  }
}

function reasonOf(error) {
  if (error.name === "AbortError") return "stopped";
  return error.status === 0 ? "lost" : "failed";
}
