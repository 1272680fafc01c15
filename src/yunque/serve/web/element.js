/** Elements built one by one: what a model writes only ever becomes the text of a text node. */

/** `on` holds listeners by event; true stands for an empty attribute; false and null leave one out. */
export function element(tag, { on = {}, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) {
      made.setAttribute(name, value === true ? "" : String(value));
    }
  }
  for (const [event, listener] of Object.entries(on)) made.addEventListener(event, listener);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A quiet button of a row of actions. */
export function action(label, listener, attributes = {}) {
  return element("button", { type: "button", class: "action", ...attributes, on: { click: listener } }, label);
}

/** Set the text only when it differs, so that a selection in it survives. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}
