/** JSON as text: laid out while it still streams, and tool definitions read from what a person typed. */

/** JSON text, complete or cut off anywhere, with line breaks and indents; strings are left as they are. */
export function layOut(text) {
  let out = "";
  let depth = 0;
  let isInString = false;
  for (let i = 0; i < text.length; i += 1) {
    const sign = text[i];
    if (isInString) {
      out += sign;
      if (sign === "\\" && i + 1 < text.length) out += text[(i += 1)];
      else if (sign === '"') isInString = false;
      continue;
    }
    switch (sign) {
      case '"':
        isInString = true;
        out += sign;
        break;
      case "{":
      case "[": {
        const close = /^\s*([}\]])/.exec(text.slice(i + 1, i + 80));
        if (close) {
          out += sign + close[1];
          i += close[0].length;
        } else {
          depth += 1;
          out += sign + lineBreak(depth);
        }
        break;
      }
      case "}":
      case "]":
        depth = Math.max(0, depth - 1);
        out += lineBreak(depth) + sign;
        break;
      case ",":
        out += sign + lineBreak(depth);
        break;
      case ":":
        out += ": ";
        break;
      default:
        if (!/\s/.test(sign)) out += sign;
    }
  }
  return out;
}

/** Whether a call's arguments are complete: a JSON object. */
export function isObject(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

/** Tool definitions: OpenAI's entries, or bare functions, one or a list. Throws an `Error` that says what is wrong. */
export function readTools(text) {
  if (!text.trim()) return [];
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  return (Array.isArray(value) ? value : [value]).map((entry, i) => {
    const tool = entry?.function ? entry : { type: "function", function: entry };
    if (typeof tool.function?.name !== "string" || !tool.function.name) throw new Error(`Tool ${i + 1} has no name.`);
    return tool;
  });
}

export const EXAMPLE_TOOLS = JSON.stringify(
  [
    {
      name: "get_weather",
      description: "The weather of a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, days: { type: "integer" } },
        required: ["city"],
      },
    },
  ],
  null,
  2,
);

function lineBreak(depth) {
  return `\n${"  ".repeat(depth)}`;
}
