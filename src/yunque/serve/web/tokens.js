/** The tokens of a reply, coloured by how unlikely each was, with the alternatives of the one looked at. */

import { byId, element } from "./element.js";

const LEVELS = [0.9, 0.7, 0.4, 0.2, 0.05];
const SPECIAL = /^<(?:\|\w+\||\/?(?:think|tool_call|tool_response|arg_key|arg_value))>$/;
let numFlows = 0;

/** How unlikely a token was: 0 (at least 90 %) to 5 (below 5 %). */
export function surprise(logprob) {
  const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
  return level < 0 ? LEVELS.length : level;
}

/** A text box of tokens. One is active: by hovering, by a tap, or with the arrow keys; its card shows alternatives. */
export class TokenFlow {
  #entries = [];
  #text = new TextDecoder();
  #active = -1;
  #isPinned = false;

  constructor(label) {
    numFlows += 1;
    this.node = element("div", {
      class: "token-flow",
      id: `tokens-${numFlows}`,
      role: "listbox",
      tabindex: "0",
      "aria-label": label,
      on: {
        mouseover: (event) => this.#point(event.target, false),
        mouseleave: () => this.#isPinned || this.#show(-1),
        click: (event) => this.#point(event.target, true),
        keydown: (event) => this.#press(event),
        blur: () => this.#show(-1),
      },
    });
  }

  /** Show the tokens that are new in `entries`, which only ever grow. */
  update(entries) {
    for (const entry of entries.slice(this.#entries.length)) {
      this.node.append(this.#token(entry, this.#entries.length));
      this.#entries.push(entry);
    }
  }

  #token(entry, place) {
    // The bytes of one sign may be spread over tokens: its text stands in the one that completes it.
    const text = entry.bytes ? this.#text.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
    const probability = percent(entry.logprob);
    return element(
      "span",
      {
        class: SPECIAL.test(entry.token) ? "token special" : text ? "token" : "token part",
        role: "option",
        "data-place": place,
        "data-surprise": surprise(entry.logprob),
        "aria-selected": "false",
        "aria-label": `${visible(entry.token)}, ${probability}`,
      },
      text || "·",
    );
  }

  #point(target, isPinned) {
    const place = target.closest?.(".token")?.dataset.place;
    if (place === undefined || (this.#isPinned && !isPinned)) return;
    this.#isPinned = isPinned && !(this.#isPinned && Number(place) === this.#active);
    this.#show(Number(place));
  }

  #press(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") {
      if (this.#active >= 0) event.stopPropagation();
      this.#show(-1);
    } else if (event.key in steps) {
      event.preventDefault();
      this.#isPinned = true;
      this.#show(Math.min(Math.max(this.#active + steps[event.key], 0), this.#entries.length - 1));
    }
  }

  #show(place) {
    const card = byId("token-card");
    const before = this.node.children[this.#active];
    before?.setAttribute("aria-selected", "false");
    before?.removeAttribute("id");
    this.#active = place;
    const token = this.node.children[place];
    if (!token) {
      this.#isPinned = false;
      this.node.removeAttribute("aria-activedescendant");
      card.hidden = true;
      return;
    }
    token.id = `${this.node.id}-active`;
    token.setAttribute("aria-selected", "true");
    this.node.setAttribute("aria-activedescendant", token.id);
    card.replaceChildren(...cardOf(this.#entries[place]));
    card.hidden = false;
    place === 0 ? this.node.scrollIntoView({ block: "nearest" }) : token.scrollIntoView({ block: "nearest" });
    putBeside(card, token.getClientRects()[0] ?? token.getBoundingClientRect());
  }
}

function cardOf(entry) {
  const chosen = element("p", { class: "chosen" }, element("code", {}, visible(entry.token)));
  const fact = element("p", { class: "note" }, `${percent(entry.logprob)} · log-probability ${signed(entry.logprob)}`);
  const rows = (entry.top_logprobs ?? []).map((other) => {
    const bar = element("span", { class: "share" });
    bar.style.inlineSize = `${100 * Math.exp(other.logprob)}%`;
    return element(
      "li",
      { class: sameBytes(other, entry) ? "is-chosen" : null },
      element("code", {}, visible(other.token)),
      element("span", { class: "share-of" }, bar),
      element("span", { class: "number" }, percent(other.logprob)),
    );
  });
  return [chosen, fact, rows.length ? element("ol", { class: "alternatives" }, ...rows) : null].filter(Boolean);
}

/** Below the token, or above it where there is no room; inside the window. */
function putBeside(card, place) {
  const { innerWidth: width, innerHeight: height } = window;
  const size = card.getBoundingClientRect();
  const below = place.bottom + 6;
  const top = below + size.height > height ? Math.max(6, place.top - size.height - 6) : below;
  card.style.insetInlineStart = `${Math.max(6, Math.min(place.left, width - size.width - 6))}px`;
  card.style.insetBlockStart = `${top}px`;
}

function sameBytes(one, other) {
  return one.token === other.token && String(one.bytes) === String(other.bytes);
}

/** A token's text with its white space made visible. */
export function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

function signed(value) {
  return value.toFixed(3).replace("-", "−");
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(0) : share >= 0.01 ? share.toFixed(2) : "< 0.01"} %`;
}

/** Where the thought's tokens end: after `</think>`, or at the end while that has not come. */
export function thoughtEnd(entries) {
  const place = entries.findIndex((entry) => entry.token === "</think>");
  return place < 0 ? entries.length : place + 1;
}

