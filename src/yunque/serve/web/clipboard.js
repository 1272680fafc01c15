/** Copying: the clipboard's own interface where the page has it (HTTPS, loopback), the old command elsewhere. */

import { element } from "./element.js";

/** Whether `text` was copied. */
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Refused: the old way may still be open.
    }
  }
  const before = document.activeElement;
  const field = element("textarea", { class: "hidden", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  before?.focus();
  return isCopied;
}

/** Copy, and say so on the button for a moment. */
export async function copyWith(button, text) {
  const label = button.textContent;
  button.textContent = (await copy(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = label), 1200);
}
