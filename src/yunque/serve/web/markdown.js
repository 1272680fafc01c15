/** A small Markdown, as DOM nodes: code blocks, headings, lists, paragraphs; inline code and bold. Nothing else. */

import { element, setText } from "./element.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const RULE = /^ {0,3}(?:-{3,}|\*{3,}|_{3,})\s*$/;

/**
 * The blocks of a text: `{ kind: "code", language, text }`, `{ kind: "heading", level, text }`, `{ kind: "rule" }`,
 * `{ kind: "list", items: [{ depth, number, text }] }`, `{ kind: "text", text }`. A fence that is still open is a
 * code block already.
 */
export function blocks(source) {
  const found = [];
  const lines = source.split("\n");
  for (let i = 0; i < lines.length; i += 1) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence) {
      const end = closing(lines, i + 1, fence[1]);
      found.push({ kind: "code", language: fence[2], text: lines.slice(i + 1, end).join("\n") });
      i = end;
      continue;
    }
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    const last = found.at(-1);
    if (RULE.test(line)) found.push({ kind: "rule" });
    else if (heading) found.push({ kind: "heading", level: heading[1].length, text: heading[2] });
    else if (item) addItem(found, item);
    else if (!line.trim()) found.push({ kind: "gap" });
    else if (last?.kind === "list") last.items.at(-1).text += `\n${line.trim()}`;
    else if (last?.kind === "text") last.text += `\n${line}`;
    else found.push({ kind: "text", text: line });
  }
  return joinLists(found);
}

/** Show `source` in `container`. Blocks that have not changed since the last call keep their nodes. */
export function render(container, source) {
  const { source: last, found: before } = shown.get(container) ?? { source: "", found: [] };
  if (source === last) return;
  const next = blocks(source).map((block) => ({ block, key: JSON.stringify(block) }));
  let same = 0;
  while (same < next.length && before[same]?.key === next[same].key) same += 1;
  const [old, fresh] = [before[same], next[same]];
  // The block that is being written keeps its node where it can, so that a long one is not built again each time.
  if (old?.block.kind === "code" && fresh?.block.kind === "code" && old.block.language === fresh.block.language) {
    setText(container.children[same].querySelector("code"), fresh.block.text);
    same += 1;
  }
  while (container.children.length > same) container.lastChild.remove();
  for (const { block } of next.slice(same)) container.append(node(block));
  shown.set(container, { source, found: next });
}

/** Empty `container` for something else; `render` begins anew in it. */
export function clear(container) {
  container.replaceChildren();
  shown.delete(container);
}

const shown = new WeakMap();

function closing(lines, begin, mark) {
  const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  for (let i = begin; i < lines.length; i += 1) if (end.test(lines[i])) return i;
  return lines.length;
}

function addItem(found, [, indent, number, text]) {
  const item = { depth: indent.replaceAll("\t", "    ").length, number: number ?? null, text };
  const last = found.at(-1);
  if (last?.kind === "list") last.items.push(item);
  else found.push({ kind: "list", items: [item] });
}

/** Lists that only blank lines part are one list; other gaps have done their work. */
function joinLists(found) {
  const joined = [];
  let hadGap = false;
  for (const block of found) {
    const last = joined.at(-1);
    const goesOn =
      hadGap && block.kind === "list" && last?.kind === "list" && isOrdered(block) === isOrdered(last);
    if (block.kind === "gap") {
      hadGap = true;
      continue;
    }
    if (goesOn) last.items.push(...block.items);
    else joined.push(block);
    hadGap = false;
  }
  return joined;
}

function isOrdered(list) {
  return list.items[0].number !== null;
}

function node(block) {
  switch (block.kind) {
    case "code":
      return codeBlock(block);
    case "heading":
      return element("h3", { class: block.level > 2 ? "minor" : null }, ...inline(block.text));
    case "rule":
      return element("hr");
    case "list":
      return list(block.items);
    default:
      return element("p", {}, ...inline(block.text));
  }
}

function codeBlock({ language, text }) {
  const code = element("code", {}, text);
  return element(
    "figure",
    { class: "code-block" },
    element(
      "figcaption",
      {},
      element("span", {}, language || "text"),
      element("button", { type: "button", class: "action", "data-copy": "code" }, "Copy"),
    ),
    element("pre", { tabindex: "0" }, code),
  );
}

/** Nested by indent: an item that stands deeper than the one before begins a list inside it. */
function list(items) {
  const root = element(...listTag(items[0]));
  const open = [{ depth: items[0].depth, list: root }];
  for (const item of items) {
    while (open.length > 1 && item.depth < open.at(-1).depth) open.pop();
    if (item.depth > open.at(-1).depth + 1 && open.at(-1).list.lastChild) {
      const inner = element(...listTag(item));
      open.at(-1).list.lastChild.append(inner);
      open.push({ depth: item.depth, list: inner });
    }
    open.at(-1).list.append(element("li", {}, ...inline(item.text)));
  }
  return root;
}

function listTag(item) {
  return item.number === null ? ["ul", {}] : ["ol", { start: item.number }];
}

/** Inline code and bold; every other sign is text. */
function inline(text) {
  const nodes = [];
  let begin = 0;
  for (const match of text.matchAll(/(`+)(?!`)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*/g)) {
    if (match.index > begin) nodes.push(text.slice(begin, match.index));
    const [whole, , code, bold] = match;
    nodes.push(code === undefined ? element("strong", {}, ...inline(bold)) : element("code", {}, code.trim() || code));
    begin = match.index + whole.length;
  }
  if (begin < text.length) nodes.push(text.slice(begin));
  return nodes;
}
