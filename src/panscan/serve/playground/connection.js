/** The connection: whether the server is ready, which model it serves, and the API key if it requires one. */

import { ApiError, checkReady, fetchModel, setKey } from "./api.js";
import { byId, say } from "./dom.js";

const RETRY_MS = 2_000;

/** The state of the server, shown in the page's header. Retries until the server can answer. */
export class Connection {
  /** @param {function(object)} onModel called with the model's description once the server is ready. */
  constructor(onModel) {
    this.onModel = onModel;
    this.timer = 0;
    this.triedKey = false;
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      setKey(byId("key").value.trim());
      this.triedKey = true;
      byId("key-form").hidden = true;
      this.connect();
    });
  }

  /** Fetch the model's description; retry until the server is ready. */
  async connect() {
    clearTimeout(this.timer);
    try {
      await checkReady();
      const model = await fetchModel();
      this.#show("ok", [model.id, model.panscan.runner, model.panscan.dtype].join(" · "));
      this.onModel(model);
    } catch (error) {
      this.report(
        error instanceof ApiError ? error : new ApiError(0, `Unexpected response from the server: ${error.message}`),
      );
    }
  }

  /** Show an error that affects the whole server; return whether it does. */
  report(error) {
    if (error.status === 401) {
      this.#show("fair", "API key required");
      byId("key-form").hidden = false;
      if (this.triedKey) byId("key-note").textContent = "The server rejected this key.";
      byId("key").focus();
      return true;
    }
    if (error.status !== 0 && error.status !== 503) return false;
    this.#show(error.status === 0 ? "bad" : "fair", error.status === 0 ? "Not connected" : "Not ready", error.message);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.connect(), RETRY_MS);
    return true;
  }

  #show(state, text, problem = "") {
    byId("model").dataset.state = state;
    if (byId("model-text").textContent !== text) byId("model-text").textContent = text;
    const notice = byId("connection");
    if (notice.textContent !== problem) say(notice, problem);
    notice.classList.toggle("bad", state === "bad");
    notice.classList.toggle("fair", state === "fair");
  }
}
