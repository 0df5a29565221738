// Talking to the server: JSON, and the events of an answer.

const KEY = "langchain-card key";

/** What the server refused, or could not do; `status` is that of HTTP, or 0. */
export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Keeps the key that the server asks for, as long as the tab is open. */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** The first of the models that are served. */
export async function modelName() {
  const response = await request("v1/models", {});
  return (await response.json()).data[0].id;
}

/** The events of a streamed answer, as objects. Raises a Problem when one tells of an error, or the end is missing. */
export async function* completion(body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await request("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  let waiting = "";
  for await (const text of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const events = (waiting + text).split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (!event.startsWith("data: ")) continue;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Problem(data.error.message);
      yield data;
    }
  }
  throw new Problem("The connection ended before the answer did.");
}

async function* pieces(stream) {
  const reader = stream.getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Problem("The connection was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function request(path, options) {
  const headers = { ...options.headers };
  if (hasKey()) headers.authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Problem("The server cannot be reached.");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Problem(said?.error?.message ?? `The server answered ${response.status}.`, response.status);
}
