/** The thread: one view per message, kept in step with the conversation once per frame. */

import { action, byId, element } from "./element.js";
import { QuestionView, ReplyView } from "./messages.js";

const NEAR_END_PX = 80;

/** `state()` gives `{ conversation, reply, writer, problem, model }`: what there is to show at the moment. */
export class Thread {
  #state;
  #on;
  #views = new Map();
  #root = byId("thread");
  #scroller = byId("scroller");
  #toEnd = byId("to-end");
  #frame = 0;
  #follows = true;

  constructor(state, on) {
    this.#state = state;
    this.#on = on;
    this.#scroller.addEventListener("scroll", () => {
      this.#follows = this.#distance() < NEAR_END_PX;
      this.#toEnd.hidden = this.#follows;
      byId("token-card").hidden = true;
    }, { passive: true });
    this.#toEnd.addEventListener("click", () => this.follow());
  }

  /** Show the state with the next frame. */
  schedule() {
    this.#frame ||= requestAnimationFrame(() => this.show());
  }

  /** Show the state now (frames stand still while the page is hidden). */
  show() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { conversation, reply, writer, problem } = this.#state();
    const messages = conversation.messages.filter((message) => message.role !== "tool");
    this.#dropViews(new Set(messages));
    const lastQuestion = conversation.lastQuestion();
    for (const message of messages) {
      this.#view(message).update({
        writer: message === reply ? writer : null,
        resultOf: (callId) => conversation.resultOf(callId),
        isLast: message === conversation.last,
        isLastQuestion: message === lastQuestion,
        canAnswer: message === conversation.last && writer === null,
        isBusy: writer !== null,
      });
    }
    this.#showNotice(conversation, problem, writer);
    if (this.#follows) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    else this.#toEnd.hidden = false;
  }

  /** Go to the end, and stay there while replies grow. */
  follow() {
    this.#follows = true;
    this.#toEnd.hidden = true;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  #view(message) {
    let view = this.#views.get(message);
    if (!view) {
      view = message.role === "user" ? new QuestionView(message, this.#on) : new ReplyView(message, this.#on);
      this.#views.set(message, view);
      this.#root.querySelector(".notice, .welcome")?.remove();
      this.#root.append(view.node);
    }
    return view;
  }

  #dropViews(kept) {
    for (const [message, view] of this.#views) {
      if (kept.has(message)) continue;
      view.node.remove();
      this.#views.delete(message);
    }
  }

  /** What stands below the messages: a problem, an unanswered question, or a welcome. */
  #showNotice(conversation, problem, writer) {
    const key = JSON.stringify([problem, conversation.isEmpty, writer === null, conversation.last?.role]);
    const before = this.#root.querySelector(".notice, .welcome");
    if (before?.dataset.key === key) return;
    before?.remove();
    const made = this.#notice(conversation, problem, writer);
    if (!made) return;
    made.dataset.key = key;
    this.#root.append(made);
  }

  #notice(conversation, problem, writer) {
    if (writer) return null;
    if (problem) {
      const buttons = element("div", { class: "actions" });
      if (problem.needsKey) buttons.append(action("Enter a key", () => this.#on.key(problem.title)));
      if (problem.canRetry) buttons.append(action("Try again", () => this.#on.again()));
      return element(
        "section",
        { class: "notice problem", role: "alert" },
        element("h2", {}, problem.title),
        element("p", {}, problem.detail),
        buttons,
      );
    }
    if (conversation.isEmpty) return welcome();
    if (conversation.last.role === "assistant") return null;
    return element(
      "section",
      { class: "notice" },
      element("p", {}, "There is no reply yet."),
      element("div", { class: "actions" }, action("Ask again", () => this.#on.again())),
    );
  }

  #distance() {
    return this.#scroller.scrollHeight - this.#scroller.scrollTop - this.#scroller.clientHeight;
  }
}

function welcome() {
  return element(
    "section",
    { class: "welcome" },
    element("h2", {}, "What shall we talk about?"),
    element("p", {}, "The conversation stays in this browser. Settings has the system prompt, sampling, tools, and the log-probability of every token."),
  );
}
