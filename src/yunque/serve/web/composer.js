/** The field one writes in, with its keys and buttons. */

import { byId } from "./element.js";

/** `on.send(text)`, `on.stop()`, `on.editLast()`, `on.cancelEdit()`. */
export class Composer {
  #field = byId("message");
  #send = byId("send");
  #stop = byId("stop");
  #cancel = byId("cancel-edit");
  #on;
  #isBusy = false;

  constructor(on) {
    this.#on = on;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#field.addEventListener("keydown", (event) => this.#press(event));
    this.#field.addEventListener("input", () => this.#changed());
    this.#stop.addEventListener("click", () => on.stop());
    this.#cancel.addEventListener("click", () => on.cancelEdit());
    document.addEventListener("keydown", (event) => {
      const isTaken = event.defaultPrevented || document.querySelector("dialog[open]");
      if (event.key === "Escape" && this.#isBusy && !isTaken) on.stop();
    });
    this.#changed();
  }

  setBusy(isBusy) {
    const hadFocus = [this.#send, this.#stop].includes(document.activeElement);
    this.#isBusy = isBusy;
    this.#stop.hidden = !isBusy;
    this.#send.hidden = isBusy;
    if (hadFocus) this.#field.focus();
  }

  /** Put `text` into the field; `isEdit` shows that it replaces the last message. */
  fill(text, { isEdit = false } = {}) {
    this.#field.value = text;
    this.#cancel.hidden = !isEdit;
    this.#changed();
    this.#field.focus();
  }

  #press(event) {
    if (event.isComposing) return; // an input method's Enter takes a word
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#submit();
    } else if (event.key === "ArrowUp" && !this.#field.value && !this.#isBusy) {
      event.preventDefault();
      this.#on.editLast();
    } else if (event.key === "Escape" && !this.#cancel.hidden) {
      event.preventDefault();
      this.#on.cancelEdit();
    }
  }

  #submit() {
    const text = this.#field.value;
    if (!text.trim() || this.#isBusy || !this.#on.send(text)) return;
    this.fill("");
  }

  #changed() {
    this.#send.disabled = !this.#field.value.trim();
    this.#field.style.blockSize = "auto";
    this.#field.style.blockSize = `${this.#field.scrollHeight + 2}px`;
  }
}
