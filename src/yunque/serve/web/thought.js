/** The fold of a reply's thinking: open while it thinks, closed when the answer begins, and the reader's after that. */

import { element, setText } from "./element.js";
import { seconds } from "./reply.js";

export class Thought {
  #summary = element("summary", {});
  #wasThinking = false;
  #text = element("div", { class: "thought-text" });

  constructor() {
    this.node = element("details", { class: "thought" }, this.#summary, this.#text);
  }

  /** `content` is what the fold holds: text, or a node in its place. */
  update({ isThinking, thinkingS, thoughtS }, content) {
    if (isThinking !== this.#wasThinking) this.node.open = isThinking;
    this.#wasThinking = isThinking;
    this.node.classList.toggle("is-thinking", isThinking);
    setText(this.#summary, summary(isThinking, thinkingS, thoughtS));
    if (typeof content === "string") setText(this.#text, content);
    else if (this.#text.firstChild !== content) this.#text.replaceChildren(content);
  }
}

function summary(isThinking, thinkingS, thoughtS) {
  if (isThinking) return `Thinking… ${Math.floor(thinkingS)} s`;
  return thoughtS === null ? "Thought" : `Thought for ${seconds(thoughtS)}`;
}
