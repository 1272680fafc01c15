/** Asks for the API key. */

import { byId, setText } from "./element.js";

export class KeyDialog {
  #dialog = byId("key-dialog");
  #field = byId("key");

  /** `taken()` is called when the key was changed. */
  constructor(keys, taken) {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      keys.write(this.#field.value.trim());
      this.#close();
      taken();
    });
    byId("key-cancel").addEventListener("click", () => this.#close());
    this.#dialog.addEventListener("close", () => (this.#field.value = ""));
  }

  open(reason) {
    setText(byId("key-reason"), reason);
    if (!this.#dialog.open) this.#dialog.showModal();
    this.#field.focus();
  }

  #close() {
    this.#dialog.close();
  }
}
