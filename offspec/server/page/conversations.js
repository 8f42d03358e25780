// Conversations in the browser's storage. If it is full, the oldest are deleted; damaged ones are deleted when read.

import { keys, read, readJson, remove as removeItem, write } from "./storage.js";

const PREFIX = "offspec-conversation:";
const MOST = 100; // maximum number of conversations
const ROOM = 4_000_000; // maximum total characters; browsers allow about 5 million
const TEXTS = ["content", "thought", "note"]; // text fields of a message

export const empty = () => ({ id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, messages: [] });

export const title = ({ messages }) => messages[0].content.trim().slice(0, 200);

// Return all conversations, the latest first.
export function list() {
  const found = keys(PREFIX).map((key) => load(key.slice(PREFIX.length)));
  return found.filter(Boolean).sort((a, b) => b.time - a.time);
}

// Return a stored conversation, or null.
export function load(id) {
  const stored = readJson(PREFIX + id);
  if (stored && isValid(stored)) {
    const messages = stored.messages.map((message, at) => ({
      role: role(at),
      ...Object.fromEntries(TEXTS.map((name) => [name, String(message[name] ?? "")])),
    }));
    return { id, time: stored.time, messages, size: read(PREFIX + id).length };
  }
  remove(id);
  return null;
}

// Save a conversation. Return whether it is stored.
export function save({ id, messages }) {
  const text = JSON.stringify({ time: Date.now(), messages });
  if (text.length > ROOM) return false;
  const others = list().filter((other) => other.id !== id);
  let total = text.length + others.reduce((sum, { size }) => sum + size, 0);
  let freed = 0;
  const drop = () => {
    const { id: oldest, size } = others.pop();
    remove(oldest);
    total -= size;
    freed += size;
  };
  while (others.length >= MOST || total > ROOM) drop();
  while (!write(PREFIX + id, text)) {
    if (!others.length || freed > 2 * text.length) return false; // blocked, or something else fills it
    drop();
  }
  return true;
}

export const remove = (id) => removeItem(PREFIX + id);

const role = (at) => (at % 2 ? "assistant" : "user");

const isValid = ({ time, messages }) =>
  Number.isFinite(time) &&
  Array.isArray(messages) &&
  messages.length > 0 &&
  messages.every((message, at) => message?.role === role(at) && typeof message.content === "string");
