/** The side panel: what is asked for with each message, kept in the browser, and turned into request fields. */

import { byId, setText } from "./element.js";
import { EXAMPLE_TOOLS, readTools } from "./json_text.js";

const TEXTS = ["system", "thinking", "temperature", "topP", "maxTokens", "seed", "tools"];
const NUMBERS = { temperature: "temperature", topP: "top_p", maxTokens: "max_tokens", seed: "seed" };
const TOP_ALTERNATIVES = 5;

export class Settings {
  #kept;
  #form = byId("settings");
  #panel = byId("panel");
  #toggle = byId("panel-toggle");

  constructor(kept) {
    this.#kept = kept;
    const found = kept.read() ?? {};
    for (const name of TEXTS) if (typeof found[name] === "string") this.#field(name).value = found[name];
    this.#field("logprobs").checked = found.logprobs === true;
    this.#form.addEventListener("input", () => this.#changed());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#toggle.addEventListener("click", () => this.open(this.#panel.hidden));
    byId("panel-close").addEventListener("click", () => this.open(false));
    this.#panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      this.open(false);
    });
    byId("tools-example").addEventListener("click", () => {
      this.#field("tools").value = EXAMPLE_TOOLS;
      this.#changed();
    });
    this.#checkTools();
    this.open(found.isOpen === true && matchMedia("(min-width: 60rem)").matches, { moves: false });
  }

  get system() {
    return this.#field("system").value;
  }

  open(isOpen, { moves = true } = {}) {
    this.#panel.hidden = !isOpen;
    this.#toggle.setAttribute("aria-expanded", String(isOpen));
    if (moves) (isOpen ? this.#field("system") : this.#toggle).focus();
    this.#save();
  }

  showContext(length) {
    setText(byId("context"), length ? `Prompt and reply may have ${length.toLocaleString("en")} tokens together.` : "");
  }

  showKey(hasKey) {
    setText(byId("key-state"), hasKey ? "A key is set for this tab." : "No key is set.");
    setText(byId("key-change"), hasKey ? "Change the API key" : "Enter an API key");
  }

  /** Whether everything in the panel can be sent; opens it at the field that can't. */
  isValid() {
    const isRight = this.#form.checkValidity() && this.#checkTools();
    if (!isRight) {
      this.open(true, { moves: false });
      if (this.#form.reportValidity()) this.#field("tools").focus();
    }
    return isRight;
  }

  /** The request fields, without the messages; what is left empty is the server's to choose. */
  fields() {
    const fields = {};
    for (const [name, wire] of Object.entries(NUMBERS)) {
      const { value } = this.#field(name);
      if (value !== "") fields[wire] = Number(value);
    }
    const thinking = this.#field("thinking").value;
    if (thinking !== "default") fields.chat_template_kwargs = { enable_thinking: thinking === "on" };
    const tools = readTools(this.#field("tools").value);
    if (tools.length) fields.tools = tools;
    if (this.#field("logprobs").checked) Object.assign(fields, { logprobs: true, top_logprobs: TOP_ALTERNATIVES });
    return fields;
  }

  #field(name) {
    return this.#form.elements.namedItem(name);
  }

  #changed() {
    this.#checkTools();
    this.#save();
  }

  #checkTools() {
    const field = this.#field("tools");
    let text = "";
    let isRight = true;
    try {
      const names = readTools(field.value).map((tool) => tool.function.name);
      text = names.length ? `The model may call ${names.join(", ")}. You give the results.` : "";
    } catch (error) {
      text = error.message;
      isRight = false;
    }
    field.setAttribute("aria-invalid", String(!isRight));
    setText(byId("tools-state"), text);
    byId("tools-example").hidden = field.value.trim() !== "";
    return isRight;
  }

  #save() {
    const values = Object.fromEntries(TEXTS.map((name) => [name, this.#field(name).value]));
    this.#kept.write({ ...values, logprobs: this.#field("logprobs").checked, isOpen: !this.#panel.hidden });
  }
}
