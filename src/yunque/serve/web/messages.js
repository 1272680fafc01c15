/** Messages as they stand in the thread: the user's, and the model's with thought, text, calls, tokens and figures. */

import { copyWith } from "./clipboard.js";
import { action, element, setText } from "./element.js";
import { clear, render } from "./markdown.js";
import { figures, isBlank, usableCalls } from "./reply.js";
import { Thought } from "./thought.js";
import { thoughtEnd, TokenFlow } from "./tokens.js";
import { ToolCard } from "./tool_card.js";

/** What the user said. `on.edit` may be asked for the last one. */
export class QuestionView {
  #text = element("div", { class: "question-text" });
  #edit;

  constructor(message, on) {
    this.#edit = action("Edit", () => on.edit(message));
    const copy = action("Copy", (event) => copyWith(event.currentTarget, message.content));
    this.node = element(
      "article",
      { class: "message question", "aria-label": "You" },
      this.#text,
      element("div", { class: "actions" }, copy, this.#edit),
    );
    setText(this.#text, message.content);
  }

  update({ isLastQuestion, isBusy }) {
    this.#edit.hidden = !isLastQuestion || isBusy;
  }
}

/** What the model said. `on.retry(message)`, `on.results(message, [{ callId, content }])`. */
export class ReplyView {
  #message;
  #on;
  #thought = null;
  #text = element("div", { class: "prose" });
  #calls = element("form", { class: "calls" });
  #cards = [];
  #submit = element("button", { type: "submit", class: "primary" }, "Send result");
  #flows = null;
  #showsTokens = true;
  #end = element("p", { class: "end", hidden: true });
  #figures = element("dl", { class: "figures" });
  #actions;

  constructor(message, on) {
    this.#message = message;
    this.#on = on;
    this.#actions = {
      copy: action("Copy", (event) => copyWith(event.currentTarget, this.#message.content)),
      tokens: action("Tokens", () => this.#switchTokens(), { "aria-pressed": "true" }),
      retry: action("Retry", () => on.retry(message)),
    };
    this.#calls.append(this.#submit);
    this.#calls.addEventListener("submit", (event) => this.#sendResults(event));
    this.#calls.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#sendResults(event);
    });
    this.#text.addEventListener("click", ({ target }) => {
      if (target.dataset?.copy) copyWith(target, target.closest("figure").querySelector("code").textContent);
    });
    const foot = element("div", { class: "foot" }, this.#figures, element("div", { class: "actions" }));
    foot.lastChild.append(this.#actions.copy, this.#actions.tokens, this.#actions.retry);
    this.node = element("article", { class: "message reply", "aria-label": "Model" }, this.#text, this.#calls, this.#end, foot);
  }

  /** `writer` is there while the reply comes; `resultOf` finds the result of a call. */
  update({ writer, resultOf, isLast, canAnswer, isBusy }) {
    const message = this.#message;
    const isComing = writer !== null;
    this.node.classList.toggle("is-coming", isComing);
    this.node.setAttribute("aria-busy", String(isComing));
    this.#updateText(writer);
    this.#updateCalls(isComing, resultOf, canAnswer);
    this.#updateEnd(isComing);
    if (!isComing) this.#updateFigures();
    this.#actions.copy.hidden = isComing || !message.content;
    this.#actions.tokens.hidden = !message.tokens;
    this.#actions.retry.hidden = !isLast || isBusy;
  }

  #updateText(writer) {
    const message = this.#message;
    const asTokens = Boolean(message.tokens) && this.#showsTokens;
    const end = asTokens && message.reasoning ? thoughtEnd(message.tokens) : 0;
    if (asTokens) {
      this.#flows ??= { thought: new TokenFlow("Tokens of the thought"), answer: new TokenFlow("Tokens of the answer") };
      this.#flows.thought.update(message.tokens.slice(0, end));
      this.#flows.answer.update(message.tokens.slice(end));
      if (this.#text.firstChild !== this.#flows.answer.node) {
        clear(this.#text);
        this.#text.append(this.#flows.answer.node);
      }
    } else {
      if (this.#flows && this.#text.firstChild === this.#flows.answer.node) clear(this.#text);
      render(this.#text, message.content);
    }
    this.#updateThought(writer, asTokens);
  }

  #updateThought(writer, asTokens) {
    const message = this.#message;
    if (!message.reasoning) return;
    if (!this.#thought) {
      this.#thought = new Thought();
      this.node.prepend(this.#thought.node);
    }
    const state = {
      isThinking: writer?.isThinking ?? false,
      thinkingS: writer?.thinkingS ?? 0,
      thoughtS: message.thoughtS,
    };
    this.#thought.update(state, asTokens ? this.#flows.thought.node : message.reasoning.trim());
  }

  #updateCalls(isComing, resultOf, canAnswer) {
    for (const [i, call] of this.#message.calls.entries()) {
      if (!this.#cards[i]) {
        this.#cards[i] = new ToolCard();
        this.#submit.before(this.#cards[i].node);
      }
      this.#cards[i].update(call, { isComing, result: resultOf(call.id), canAnswer });
    }
    const fields = this.#cards.filter((card) => card.field);
    this.#submit.hidden = fields.length === 0;
    setText(this.#submit, fields.length > 1 ? "Send results" : "Send result");
  }

  #updateEnd(isComing) {
    const words = {
      length: "Cut off: the token limit or the context was reached.",
      stopped: "Stopped.",
      failed: `The reply broke off: ${this.#message.failure}`,
    };
    const { finish } = this.#message;
    const text = isComing ? "" : finish === null ? "The page was left while this reply came." : (words[finish] ?? "");
    const note = text || (!isComing && isBlank(this.#message) ? "The model ended its turn without a word." : "");
    this.#end.hidden = !note;
    setText(this.#end, note);
  }

  #updateFigures() {
    const found = figures(this.#message);
    const key = JSON.stringify(found);
    if (this.#figures.dataset.key === key) return;
    this.#figures.dataset.key = key;
    const rows = found.map(({ name, value, hint }) =>
      element("div", { title: hint }, element("dt", {}, name), element("dd", {}, value)),
    );
    this.#figures.replaceChildren(...rows);
  }

  #switchTokens() {
    this.#showsTokens = !this.#showsTokens;
    this.#actions.tokens.setAttribute("aria-pressed", String(this.#showsTokens));
    this.#updateText(null);
  }

  #sendResults(event) {
    event.preventDefault();
    const results = usableCalls(this.#message).flatMap((call) => {
      const field = this.#cards.find((card) => card.node.dataset.call === call.id)?.field;
      return field ? [{ callId: call.id, content: field.value }] : [];
    });
    if (results.length) this.#on.results(this.#message, results);
  }
}
