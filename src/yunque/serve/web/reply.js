/** One reply of the model: put together from chunks, timed, and summed up. */

import { isObject } from "./json_text.js";

/** `finish`: stop, length, tool_calls, stopped (by the user), failed; null while it comes (or if the page was left). */
export function newReply() {
  return {
    role: "assistant",
    content: "",
    reasoning: "",
    calls: [],
    finish: null,
    usage: null,
    firstTokenS: null,
    thoughtS: null,
    tokensPerS: null,
    failure: null,
  };
}

/** Adds chunks to a reply. `now` gives milliseconds; the clock starts when this is made. */
export class ReplyWriter {
  #reply;
  #now;
  #sentMs;
  #firstMs = null;
  #thoughtMs = null;
  #lastMs;

  constructor(reply, now = () => performance.now()) {
    this.#reply = reply;
    this.#now = now;
    this.#sentMs = this.#lastMs = now();
  }

  /** Whether the reply is at its thoughts. */
  get isThinking() {
    return this.#thoughtMs !== null && this.#reply.thoughtS === null;
  }

  get thinkingS() {
    return this.#thoughtMs === null ? 0 : (this.#now() - this.#thoughtMs) / 1000;
  }

  take(chunk) {
    const reply = this.#reply;
    if (chunk.usage) reply.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const entries = choice.logprobs?.content ?? [];
    if (delta.reasoning_content || delta.content || delta.tool_calls || entries.length) this.#tick();
    if (delta.reasoning_content) {
      this.#thoughtMs ??= this.#now();
      reply.reasoning += delta.reasoning_content;
    }
    if (delta.content || delta.tool_calls) this.#endThought();
    reply.content += delta.content ?? "";
    for (const piece of delta.tool_calls ?? []) takeCall(reply.calls, piece);
    if (entries.length) (reply.tokens ??= []).push(...entries);
    if (choice.finish_reason) reply.finish = choice.finish_reason;
  }

  /** No more chunks come; `finish` where the server named no reason. */
  end(finish = null) {
    const reply = this.#reply;
    this.#endThought();
    reply.finish = finish ?? reply.finish ?? "stop";
    const seconds = (this.#lastMs - (this.#firstMs ?? this.#lastMs)) / 1000;
    const count = reply.usage?.completion_tokens ?? reply.tokens?.length ?? 0;
    if (seconds > 0 && count > 1) reply.tokensPerS = (count - 1) / seconds;
  }

  #tick() {
    this.#lastMs = this.#now();
    if (this.#firstMs !== null) return;
    this.#firstMs = this.#lastMs;
    this.#reply.firstTokenS = (this.#firstMs - this.#sentMs) / 1000;
  }

  #endThought() {
    if (this.isThinking) this.#reply.thoughtS = this.thinkingS;
  }
}

/** Whether nothing at all came. */
export function isBlank(reply) {
  return !reply.content && !reply.reasoning && !reply.calls.length;
}

/** Calls that can be answered: their arguments are whole. */
export function usableCalls(reply) {
  return reply.calls.filter((call) => isObject(call.arguments));
}

/** What is known about a reply, as `{ name, value, hint }`. */
export function figures(reply) {
  const { usage } = reply;
  const found = [];
  const add = (name, value, hint) => found.push({ name, value, hint });
  if (usage) add("tokens", count(usage.completion_tokens), reasoningHint(usage));
  if (reply.tokensPerS !== null) add("speed", `${number(reply.tokensPerS)} tok/s`, "Tokens after the first, per second");
  if (reply.firstTokenS !== null) add("first token", seconds(reply.firstTokenS), "From sending to the first token");
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached !== undefined && usage.prompt_tokens) {
    const hint = `${count(cached)} of the prompt’s ${count(usage.prompt_tokens)} tokens were not computed again`;
    add("cache hit", percent(cached / usage.prompt_tokens), hint);
  }
  const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } =
    usage?.completion_tokens_details ?? {};
  if (accepted !== undefined && accepted + rejected > 0) {
    const hint = `${count(accepted)} of ${count(accepted + rejected)} drafted tokens were accepted`;
    add("drafts accepted", percent(accepted / (accepted + rejected)), hint);
  }
  return found;
}

export function seconds(value) {
  return value < 1 ? `${value.toFixed(2)} s` : value < 10 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

function takeCall(calls, piece) {
  const call = (calls[piece.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= piece.id ?? "";
  call.name += piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

function reasoningHint(usage) {
  const reasoning = usage.completion_tokens_details?.reasoning_tokens;
  return reasoning ? `${count(reasoning)} of them are thinking` : "Tokens of the reply";
}

function count(value) {
  return value.toLocaleString("en");
}

function number(value) {
  return value < 10 ? value.toFixed(1) : count(Math.round(value));
}

function percent(share) {
  return `${Math.round(share * 100)} %`;
}
