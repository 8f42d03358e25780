// The conversation: questions, answers as they come, stopping, and what is shown meanwhile.

import { Refused, answer, checkKey, health, setKey } from "./api.js";
import { make, render } from "./markdown.js";
import { Speed } from "./panel.js";
import { Trees } from "./tree.js";

const $ = (id) => document.getElementById(id);
const trees = new Trees();
const speed = new Speed();
const messages = []; // {role, content}
let model = "";
let ready = false;
let running = null; // the AbortController of the answer under way

// The server and its key

async function awaitServer() {
  setReady(false);
  for (;;) {
    const told = await health();
    if (told.model) showModel(told.model);
    showLoading(told);
    if (told.status === "ready") return tryKey();
    await new Promise((done) => setTimeout(done, 1000));
  }
}

function showModel(name) {
  model = name;
  $("model").textContent = name;
  document.title = `${name} – offspec`;
}

function showLoading({ status, stage, detail, done, total }) {
  $("loading").hidden = status !== "loading";
  const shown = { ready: "", unreachable: "the server does not answer" };
  $("state").textContent = shown[status] ?? status;
  if (status !== "loading") return;
  const percent = total ? ` ${Math.floor((100 * done) / total)}%` : "";
  $("load-stage").textContent = `${stage}${detail ? `, ${detail}` : ""}${percent}`;
  if (total) $("load-progress").value = done / total;
  else $("load-progress").removeAttribute("value");
}

async function tryKey() {
  try {
    await checkKey();
    $("key-form").hidden = true;
    setReady(true);
  } catch (error) {
    failed(error);
  }
}

function setReady(value) {
  ready = value;
  $("send").disabled = !ready && !running;
}

function failed(error) {
  if (error.status === 401) {
    setReady(false);
    const first = $("key-form").hidden;
    $("key-form").hidden = false;
    $("error").textContent = first ? "" : "That is not the key";
    $("key").focus();
    return;
  }
  $("error").textContent = error.message;
  if (!error.status || error.status === 503) awaitServer();
}

// Questions and answers

async function ask(question) {
  $("error").textContent = "";
  const asked = addArticle("user", [make("p", [question])]);
  messages.push({ role: "user", content: question });
  const reply = new Reply();
  running = new AbortController();
  $("send").textContent = "Stop";
  speed.begin();
  try {
    for await (const chunk of answer(model, messages, running.signal)) reply.hear(chunk);
  } catch (error) {
    if (error.name === "AbortError") reply.reason = "stopped";
    else failed(error instanceof Refused ? error : new Refused(error.message, 500));
  }
  running = null;
  $("send").textContent = "Send";
  $("state").textContent = ready ? "" : $("state").textContent;
  setReady(ready);
  if (!asked.isConnected) return; // a new conversation has begun
  if (reply.finish()) {
    messages.push({ role: "assistant", content: reply.text });
  } else {
    messages.pop();
    asked.remove();
    $("question").value ||= question;
  }
}

// An answer on its way into the page, drawn no more often than the screen is.
class Reply {
  constructor() {
    this.text = this.thought = this.reason = "";
    this.now = {};
    this.waiting = 0;
    this.answer = make("div");
    this.answer.className = "answer";
    this.thinking = make("details", [make("summary", ["Thinking"]), make("span")]);
    this.thinking.hidden = true;
    this.article = addArticle("assistant", [this.thinking, this.answer]);
    this.article.ariaBusy = "true"; // so that it is read out when it is complete
    $("state").textContent = "waiting";
  }

  hear(chunk) {
    for (const { delta, finish_reason } of chunk.choices) {
      this.text += delta.content ?? "";
      this.thought += delta.reasoning_content ?? "";
      this.reason = finish_reason ?? this.reason;
    }
    const { tree, pass, ...now } = chunk.offspec ?? {};
    if (tree) trees.add(tree);
    if (pass) speed.add(pass);
    Object.assign(this.now, now);
    this.waiting ||= requestAnimationFrame(() => this.show());
  }

  show() {
    this.waiting = 0;
    keepingPlace(() => {
      render(this.answer, this.text);
      this.thinking.hidden = !this.thought;
      this.thinking.lastChild.textContent = this.thought;
    });
    if (this.now.prefill || this.now.progress) $("state").textContent = speed.line(this.now);
  }

  // Whether there is anything of it to keep.
  finish() {
    cancelAnimationFrame(this.waiting);
    render(this.answer, this.text);
    this.thinking.hidden = !this.thought;
    this.thinking.lastChild.textContent = this.thought;
    this.article.ariaBusy = "false";
    const kept = Boolean(this.text || this.thought || this.reason === "stop");
    if (!kept) this.article.remove();
    const reasons = { stopped: "stopped", length: "cut: a limit, or the context is full" };
    const why = reasons[this.reason] ?? (this.text ? "" : "nothing");
    const end = make("p", why ? [why] : []);
    end.className = "end";
    if (why) keepingPlace(() => this.article.append(end));
    return kept;
  }
}

function addArticle(role, children) {
  const article = make("article", children);
  article.className = role;
  article.ariaLabel = role === "user" ? "You" : model;
  $("messages").append(article);
  $("messages").scrollTop = $("messages").scrollHeight;
  return article;
}

// Change the conversation; whoever looks at its end goes on doing so.
function keepingPlace(change) {
  const box = $("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  change();
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function send() {
  const question = $("question").value.trim();
  if (!ready || running || !question) return;
  $("question").value = "";
  ask(question);
}

function showPasses(shown) {
  keepingPlace(() => ($("passes").hidden = !shown));
  $("passes-button").ariaExpanded = String(shown);
  trees.show();
}

$("question-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else send();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("new-button").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("messages").replaceChildren();
  $("error").textContent = "";
  $("question").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key").value = "";
  tryKey().then(() => ready && $("question").focus());
});
$("passes-button").addEventListener("click", () => showPasses($("passes").hidden));

showPasses(matchMedia("(min-width: 60rem)").matches);
awaitServer();
