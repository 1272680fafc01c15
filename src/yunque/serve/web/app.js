/** The page: a conversation, its settings, and the model's replies as they come. */

import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId, setText } from "./element.js";
import { KeyDialog } from "./key_dialog.js";
import { describe } from "./problem.js";
import { isBlank, newReply, ReplyWriter } from "./reply.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";
import { ApiKey, Kept } from "./storage.js";
import { Thread } from "./thread.js";

const SAVE_EVERY_MS = 1000;

class Chat {
  #keys = new ApiKey();
  #server = new Server(this.#keys);
  #status = new Status(this.#server);
  #conversation = new Conversation(new Kept("yunque.conversation"));
  #settings = new Settings(new Kept("yunque.settings"));
  #reply = null;
  #writer = null;
  #problem = null;
  #abort = null;
  #edited = null;
  #thread = new Thread(
    () => ({
      conversation: this.#conversation,
      reply: this.#reply,
      writer: this.#writer,
      problem: this.#problem,
    }),
    {
      edit: (message) => this.#edit(message),
      retry: (message) => this.#retry(message),
      results: (message, results) => this.#answerCalls(message, results),
      again: () => this.#ask(),
      key: (reason) => this.#keyDialog.open(reason),
    },
  );
  #composer = new Composer({
    send: (text) => this.#send(text),
    stop: () => this.#abort?.abort(),
    editLast: () => this.#edit(this.#conversation.lastQuestion()),
    cancelEdit: () => this.#endEdit(),
  });
  #keyDialog = new KeyDialog(this.#keys, () => this.#keyChanged());

  start() {
    byId("new-chat").addEventListener("click", () => this.#clear());
    byId("key-change").addEventListener("click", () => this.#keyDialog.open("Sent to this server only."));
    addEventListener("pagehide", () => this.#writer && this.#conversation.save());
    this.#settings.showKey(Boolean(this.#keys.read()));
    this.#thread.show();
    this.#greet();
    byId("message").focus();
  }

  async #greet() {
    this.#status.refresh();
    try {
      this.#settings.showContext(await this.#server.contextLength());
    } catch (error) {
      if (error.status === 401) this.#askForKey(error.message);
    }
  }

  #send(text) {
    if (this.#writer || !this.#settings.isValid()) return false;
    if (this.#edited) this.#conversation.cutAt(this.#edited);
    this.#edited = null;
    this.#conversation.add({ role: "user", content: text });
    this.#ask();
    return true;
  }

  #retry(message) {
    if (this.#writer || !this.#settings.isValid()) return;
    this.#conversation.cutAt(message);
    this.#ask();
  }

  #answerCalls(message, results) {
    if (this.#writer || !this.#settings.isValid() || this.#conversation.last !== message) return;
    for (const { callId, content } of results) this.#conversation.add({ role: "tool", callId, content });
    this.#ask();
  }

  #edit(message) {
    if (!message || this.#writer) return;
    this.#edited = message;
    this.#composer.fill(message.content, { isEdit: true });
  }

  #endEdit() {
    this.#edited = null;
    this.#composer.fill("");
  }

  #clear() {
    this.#abort?.abort();
    this.#problem = null;
    this.#conversation.clear();
    this.#endEdit();
    this.#thread.follow();
    this.#thread.show();
  }

  #askForKey(reason) {
    this.#keyDialog.open(this.#keys.read() ? reason : "This server answers only with an API key.");
  }

  #keyChanged() {
    this.#settings.showKey(Boolean(this.#keys.read()));
    this.#greet();
    if (this.#problem?.needsKey && this.#problem.canRetry) this.#ask();
  }

  /** Ask for the next reply. One at a time. */
  async #ask() {
    if (this.#writer || this.#conversation.isEmpty || !this.#settings.isValid()) return;
    const conversation = this.#conversation;
    const request = { ...this.#settings.fields(), messages: conversation.toWire(this.#settings.system) };
    const reply = newReply();
    const writer = new ReplyWriter(reply);
    this.#problem = null;
    this.#abort = new AbortController();
    this.#begin(conversation.add(reply), writer);
    try {
      const chunks = this.#server.chat(request, { signal: this.#abort.signal, session: conversation.id });
      for await (const chunk of chunks) {
        writer.take(chunk);
        this.#thread.schedule();
      }
      writer.end();
      const isWaiting = reply.finish === "tool_calls";
      setText(byId("announcer"), isWaiting ? "The model waits for the result of a call." : "The reply is complete.");
    } catch (error) {
      this.#fail(error, reply, writer);
    }
    this.#finish(reply);
  }

  #begin(reply, writer) {
    this.#reply = reply;
    this.#writer = writer;
    this.#composer.setBusy(true);
    this.#thread.follow();
    this.#thread.show();
    setText(byId("announcer"), "The model is answering.");
    let savedMs = performance.now();
    const tick = setInterval(() => {
      if (this.#writer !== writer) {
        clearInterval(tick);
        return;
      }
      this.#thread.schedule(); // the seconds of the thought
      if (performance.now() - savedMs < SAVE_EVERY_MS) return;
      this.#conversation.save();
      savedMs = performance.now();
    }, 250);
  }

  #fail(error, reply, writer) {
    if (error.name === "AbortError") {
      writer.end("stopped");
      setText(byId("announcer"), "Stopped.");
      return;
    }
    writer.end("failed");
    reply.failure = error.message;
    if (isBlank(reply)) this.#problem = { ...describe(error), canRetry: true };
  }

  #finish(reply) {
    this.#writer = null;
    this.#reply = null;
    const isWithout = ["failed", "stopped"].includes(reply.finish) && isBlank(reply);
    if (isWithout) this.#conversation.cutAt(reply);
    else this.#conversation.save();
    this.#composer.setBusy(false);
    this.#thread.show();
    this.#status.refresh();
    if (this.#problem?.needsKey) this.#askForKey(this.#problem.detail);
  }
}

new Chat().start();
