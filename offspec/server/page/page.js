// Entry point of the page: its parts, and the question field.

import { Chat } from "./chat.js";
import { ConversationList } from "./conversation_list.js";
import { $ } from "./dom.js";
import { EnginePanel } from "./engine_panel.js";
import { sendOnEnter } from "./messages.js";
import { Server } from "./server.js";

const server = new Server(show);
const chat = new Chat(server, new EnginePanel(), show);
new ConversationList(chat);

// Update the elements that depend on the server and on whether an answer is in progress.
function show() {
  const running = Boolean(chat.running);
  $("send").textContent = running ? "Stop" : "Send";
  $("send").disabled = !server.ready && !running;
  document.body.classList.toggle("running", running);
  if (!server.model) return;
  $("model").textContent = server.model;
  document.title = `${server.model} – offspec`;
}

function send(text) {
  if (!server.ready || chat.running || !text) return;
  $("question").value = "";
  chat.ask(text);
}

$("question-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.submitter && chat.running) chat.stop();
  else send($("question").value.trim());
});
sendOnEnter($("question"), $("question-form"));
$("examples").addEventListener("click", ({ target }) => {
  if (target.localName !== "button") return;
  if (server.ready) {
    send(target.textContent);
    $("messages").focus();
  } else {
    $("question").value = target.textContent;
    $("question").focus();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
});

server.wait();
