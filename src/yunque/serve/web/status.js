/** The header: which model is served, and whether it can answer. */

import { byId, setText } from "./element.js";

const EVERY_MS = 10_000;

export class Status {
  #server;
  #model = byId("model");
  #health = byId("health");

  constructor(server) {
    this.#server = server;
    setInterval(() => document.hidden || this.refresh(), EVERY_MS);
    document.addEventListener("visibilitychange", () => document.hidden || this.refresh());
  }

  async refresh() {
    let found;
    try {
      found = await this.#server.health();
    } catch {
      this.#show("down", "unreachable", "Nothing answers at this address.");
      return;
    }
    if (found.model) {
      setText(this.#model, found.model);
      document.title = `${found.model} · Yunque`;
      this.#model.title = `Weights of version ${found.version}`;
    }
    if (found.ok) this.#show("ready", "ready", "A token can be made now.");
    else this.#show("down", found.reason || "not ready", "No token can be made now.");
  }

  #show(state, text, hint) {
    this.#health.dataset.state = state;
    this.#health.title = hint;
    setText(this.#health, text);
  }
}
