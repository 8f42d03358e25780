// Client of the server's API: readiness, and answers as streams of chunks. Paths are relative to the page.

import { read, write } from "./storage.js";

const KEY = "offspec-key";
const LOST = "The connection to the server was lost";

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The API key, stored until the tab is closed.
let key = read(KEY, "sessionStorage");
export function setKey(value) {
  key = value;
  write(KEY, value, "sessionStorage");
}

export async function health() {
  try {
    return await (await fetch("health", { cache: "no-store" })).json();
  } catch {
    return { status: "unreachable" };
  }
}

// Check the API key. Throws Refused if it is missing or wrong.
export const checkKey = () => send("v1/models", {});

// Yield the chunks of an answer. Throws Refused if the request is refused or the answer is aborted.
export async function* answer(request, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const headers = { "content-type": "application/json" };
  const response = await send("v1/chat/completions", { method: "POST", headers, body, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, 500);
    yield chunk;
  }
  throw new Refused(LOST, 0);
}

async function send(path, options) {
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    lost(error);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(body?.error?.message ?? `The server responded with status ${response.status}`, response.status);
}

function lost(error) {
  throw error.name === "AbortError" ? error : new Refused(LOST, 0);
}

// Yield the data of server-sent events, each on one line. Comments are skipped.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(lost);
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
