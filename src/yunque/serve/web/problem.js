/** Errors in words for the person at the page. */

/** `{ title, detail, needsKey, param }` of anything that was thrown. */
export function describe(error) {
  const { status = 0, code = "", retryAfterS = null, param = null } = error;
  return { title: title(status, code, retryAfterS), detail: error.message, needsKey: status === 401, param };
}

function title(status, code, retryAfterS) {
  if (code === "context_length_exceeded") return "This conversation no longer fits the model’s context";
  switch (status) {
    case 0:
      return "The server can’t be reached";
    case 400:
      return "The server refused this request";
    case 401:
      return "This server asks for an API key";
    case 403:
      return "This is not allowed here";
    case 413:
      return "This conversation is too large for the server";
    case 429:
      return retryAfterS === null ? "The server is busy" : `The server is busy: try again in ${retryAfterS} s`;
    case 503:
      return "The model can’t answer at the moment";
    default:
      return status >= 500 ? "The server failed on this reply" : `The server answered with status ${status}`;
  }
}
