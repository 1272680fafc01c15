/** The server behind the page: its state, its models, and replies as they come. */

import { EventDecoder } from "./sse.js";

/** What went wrong, as the server said it. `status` is 0 where no answer came at all. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = "", param = null, retryAfterS = null } = {}) {
    super(message);
    this.name = "ServerError";
    Object.assign(this, { status, code, param, retryAfterS });
  }
}

/** `keys.read()` gives the API key or "". Addresses are relative, so that the page works below a proxy's prefix. */
export class Server {
  #keys;

  constructor(keys) {
    this.#keys = keys;
  }

  /** `{ ok, model, version, reason }`; throws only where nothing answered. */
  async health() {
    const response = await reach("health", {});
    const body = await response.json().catch(() => ({}));
    return { ok: response.ok, model: body.model ?? "", version: body.version, reason: body.reason ?? "" };
  }

  /** How many tokens prompt and reply may have together, or null. */
  async contextLength() {
    const response = await reach("v1/models", { headers: this.#headers() });
    if (!response.ok) throw await problemOf(response);
    return (await response.json()).data?.[0]?.max_model_len ?? null;
  }

  /** The chunks of one reply. Leaving the loop, or `signal`, closes the connection, which frees the engine. */
  async *chat(request, { signal, session }) {
    const response = await reach("v1/chat/completions", {
      method: "POST",
      headers: { ...this.#headers(), "content-type": "application/json", "x-session-id": session },
      body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    if (!response.ok) throw await problemOf(response);
    const decoder = new EventDecoder();
    const reader = response.body.getReader();
    try {
      for (;;) {
        const { done, value } = await read(reader);
        for (const { data } of done ? decoder.finish() : decoder.feed(value)) {
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new ServerError(chunk.error.message, { status: 500, code: chunk.error.code });
          yield chunk;
        }
        if (done) throw new ServerError("The connection ended before the reply did.");
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  #headers() {
    const key = this.#keys.read();
    return key ? { authorization: `Bearer ${key}` } : {};
  }
}

async function reach(address, options) {
  try {
    return await fetch(address, { cache: "no-store", credentials: "omit", redirect: "error", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("Nothing answers at this address. Is the server running?");
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection broke off.");
  }
}

async function problemOf(response) {
  const error = (await response.json().catch(() => null))?.error ?? {};
  const wait = Number.parseFloat(response.headers.get("retry-after") ?? "");
  return new ServerError(error.message ?? `The server answered with status ${response.status}.`, {
    status: response.status,
    code: error.code ?? "",
    param: error.param ?? null,
    retryAfterS: Number.isFinite(wait) ? wait : null,
  });
}
