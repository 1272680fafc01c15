/** A tool call as a card: its arguments as they are written, and its result, shown or asked for. */

import { element, setText } from "./element.js";
import { isObject, layOut } from "./json_text.js";

/** States: writing, waiting (for a result), done, broken (the arguments are no JSON object). */
export class ToolCard {
  #name = element("code", { class: "tool-name" });
  #state = element("span", { class: "tool-state" });
  #arguments = element("pre", { class: "tool-arguments", tabindex: "0", "aria-label": "Arguments" });
  #foot = element("div", { class: "tool-foot" });
  #shown = "";
  #written = "";
  field = null;

  constructor() {
    const head = element("p", { class: "tool-head" }, element("span", { class: "tool-kind" }, "Tool call"), this.#name);
    head.append(this.#state);
    this.node = element("section", { class: "tool-card", "aria-label": "Tool call" }, head, this.#arguments, this.#foot);
  }

  /** `canAnswer`: the call is the conversation's last word, so that a result may be given. */
  update(call, { isComing, result, canAnswer }) {
    const state = stateOf(call, isComing, result);
    this.node.dataset.state = state;
    this.node.dataset.call = call.id;
    setText(this.#name, call.name);
    if (this.#written !== call.arguments) setText(this.#arguments, layOut((this.#written = call.arguments)));
    setText(this.#state, WORDS[state]);
    const foot = state === "done" ? `result ${result}` : state === "waiting" && canAnswer ? "field" : "";
    if (foot !== this.#shown) this.#showFoot(foot, call, result);
  }

  #showFoot(foot, call, result) {
    this.#shown = foot;
    this.field = null;
    if (foot === "field") {
      this.field = element("textarea", { rows: "3", class: "code", "data-result": call.id, spellcheck: "false" });
      this.#foot.replaceChildren(element("label", {}, `Result of ${call.name}`, this.field));
    } else if (foot) {
      const text = element("pre", { class: "tool-result", tabindex: "0" }, result);
      this.#foot.replaceChildren(element("p", { class: "tool-kind" }, "Result"), text);
    } else {
      this.#foot.replaceChildren();
    }
  }
}

const WORDS = { writing: "writing…", waiting: "waits for a result", done: "answered", broken: "broke off: can’t be used" };

function stateOf(call, isComing, result) {
  if (result !== null) return "done";
  if (isObject(call.arguments)) return "waiting";
  return isComing ? "writing" : "broken";
}
