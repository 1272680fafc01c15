/** Server-sent events read from bytes that were cut anywhere. */

/**
 * Reads a stream as the HTML standard says: lines end with LF, CR or CRLF, a blank line ends an event, comments and
 * unknown fields are skipped, and an event that the end of the stream cuts off is none.
 */
export class EventDecoder {
  #text = new TextDecoder();
  #rest = "";
  #data = [];
  #event = "";

  /** The events, as `{ event, data }`, that these bytes complete. */
  feed(bytes) {
    return this.#read(this.#text.decode(bytes, { stream: true }), false);
  }

  /** The stream ended: a CR that was its last character ends a line. */
  finish() {
    return this.#read(this.#text.decode(), true);
  }

  #read(text, isLast) {
    const rest = this.#rest + text;
    const events = [];
    let begin = 0;
    for (;;) {
      const end = lineEnd(rest, begin);
      if (end < 0) break;
      // A CR at the end waits: an LF after it belongs to the same line end.
      if (rest[end] === "\r" && end + 1 === rest.length && !isLast) break;
      this.#take(rest.slice(begin, end), events);
      begin = rest.startsWith("\r\n", end) ? end + 2 : end + 1;
    }
    this.#rest = rest.slice(begin);
    return events;
  }

  #take(line, events) {
    if (line === "") {
      if (this.#data.length) events.push({ event: this.#event || "message", data: this.#data.join("\n") });
      this.#data = [];
      this.#event = "";
      return;
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
  }
}

function lineEnd(text, begin) {
  const feed = text.indexOf("\n", begin);
  const carriage = text.slice(begin, feed < 0 ? undefined : feed).indexOf("\r");
  return carriage < 0 ? feed : begin + carriage;
}
