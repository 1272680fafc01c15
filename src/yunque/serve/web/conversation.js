/** The conversation: messages as the page keeps them, and as the server takes them. */

/**
 * Messages are `{ role: "user", content }`, `{ role: "tool", callId, content }`, and replies (`reply.js`). A reply's
 * `tokens` are not kept: log-probabilities are many times the size of the text.
 */
export class Conversation {
  #kept;

  constructor(kept) {
    this.#kept = kept;
    const found = kept.read();
    this.id = found?.id ?? freshId();
    this.messages = Array.isArray(found?.messages) && found.messages.every(isMessage) ? found.messages : [];
  }

  get last() {
    return this.messages.at(-1) ?? null;
  }

  get isEmpty() {
    return this.messages.length === 0;
  }

  add(message) {
    this.messages.push(message);
    this.save();
    return message;
  }

  clear() {
    this.id = freshId();
    this.messages = [];
    this.save();
  }

  /** Drop `message` and all that follows it. */
  cutAt(message) {
    const place = this.messages.indexOf(message);
    if (place >= 0) this.messages.length = place;
    this.save();
  }

  /** The user's last message, or null. */
  lastQuestion() {
    return this.messages.findLast((message) => message.role === "user") ?? null;
  }

  /** The result of a call, as text, or null. */
  resultOf(callId) {
    return this.messages.find((message) => message.role === "tool" && message.callId === callId)?.content ?? null;
  }

  save() {
    this.#kept.write({
      id: this.id,
      messages: this.messages.map(({ tokens, ...message }) => message),
    });
  }

  /** OpenAI's `messages`. */
  toWire(system) {
    const wire = this.messages.map(messageToWire);
    return system.trim() ? [{ role: "system", content: system }, ...wire] : wire;
  }
}

/** What another version of the page kept may look different: the conversation then begins anew. */
function isMessage(message) {
  return typeof message?.content === "string" && (message.role !== "assistant" || Array.isArray(message.calls));
}

function messageToWire(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  if (message.role === "user") return { role: "user", content: message.content };
  const wire = { role: "assistant", content: message.content };
  if (message.reasoning) wire.reasoning_content = message.reasoning;
  if (message.calls.length) {
    wire.tool_calls = message.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
  }
  return wire;
}

/** `crypto.randomUUID` exists only over HTTPS and on loopback. */
function freshId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
