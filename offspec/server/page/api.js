// The server's API: whether it is ready, and answers as streams of events. Paths are relative to the page.

const KEY = "offspec-key";

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// For as long as the tab lives.
export const setKey = (key) => sessionStorage.setItem(KEY, key);

export async function health() {
  try {
    return await (await fetch("health", { cache: "no-store" })).json();
  } catch {
    return { status: "unreachable" };
  }
}

// Raises Refused where the key is missing or wrong.
export const checkKey = () => send("v1/models", {});

// The chunks of an answer. Raises Refused where it is refused or broken off.
export async function* answer(model, messages, signal) {
  const body = JSON.stringify({ model, messages, stream: true, offspec: { trees: true } });
  const headers = { "content-type": "application/json" };
  const response = await send("v1/chat/completions", { method: "POST", headers, body, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, 500);
    yield chunk;
  }
  throw new Refused("the server left in the middle of the answer", 0);
}

async function send(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the server does not answer", 0);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const message = told?.error?.message ?? `the server answers with status ${response.status}`;
  throw new Refused(message, response.status);
}

// The data of server-sent events, each in one line; comments are left out.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
