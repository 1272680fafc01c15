/** What the browser keeps: the conversation and settings until they are cleared, the API key until the tab closes. */

/** A JSON value under one name of `localStorage`. Where nothing can be kept (private modes, a full disk), it is not. */
export class Kept {
  #name;

  constructor(name) {
    this.#name = name;
  }

  read() {
    try {
      return JSON.parse(localStorage.getItem(this.#name) ?? "null");
    } catch {
      return null;
    }
  }

  /** Whether it was kept. */
  write(value) {
    try {
      localStorage.setItem(this.#name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }
}

/** The API key, for this tab alone. */
export class ApiKey {
  #memory = "";

  read() {
    try {
      return sessionStorage.getItem("yunque.key") ?? this.#memory;
    } catch {
      return this.#memory;
    }
  }

  write(key) {
    this.#memory = key;
    try {
      if (key) sessionStorage.setItem("yunque.key", key);
      else sessionStorage.removeItem("yunque.key");
    } catch {
      // Kept in memory alone.
    }
  }
}
