/** The chosen document: its pages, the one on screen, and the views that the server plans for it. */

import { ATTACHED, fetchViews } from "./api.js";
import { byId, say } from "./dom.js";
import { readKnobs } from "./knobs.js";
import { drawFigures, drawPicture, drawTiles } from "./views.js";

const DEBOUNCE_MS = 100;

/** A document and its views. Responses to outdated requests are discarded. */
export class Documents {
  /**
   * @param {object} callbacks
   * @param {function(Error)} callbacks.onError called when a document or its views cannot be loaded.
   * @param {function()} callbacks.onChange called when the document has changed or was removed.
   */
  constructor({ onError, onChange }) {
    this.file = null;
    this.maxMegabytes = Infinity;
    this.onError = onError;
    this.onChange = onChange;
    this.pages = []; // those that the server drew
    this.count = 0; // pages of the document
    this.reading = false;
    this.rejected = false; // whether the last document could not be read
    this.index = 0;
    this.request = new AbortController();
    this.timer = 0;
  }

  /** Read a file chosen by the user and show its first page. */
  async open(chosen) {
    const signal = this.#restart();
    this.#clear();
    this.reading = true;
    present("loading");
    try {
      const file = await this.#read(chosen);
      const { pages, page_count: count } = await fetchViews({ image: ATTACHED, preview: true }, file, signal);
      if (signal.aborted) return;
      for (const page of pages) page.preview = objectUrl(page.preview);
      Object.assign(this, { file, pages, count, index: 0, reading: false });
      this.#show();
      this.refresh();
    } catch (error) {
      if (signal.aborted) return;
      this.reject(error);
      return;
    }
    this.onChange();
  }

  /** Keep no document, because the chosen one cannot be read: the next question waits for another choice. */
  reject(error) {
    this.#restart();
    this.#clear();
    this.rejected = true;
    this.onError(error);
    this.onChange();
  }

  /** Return a copy of the file in memory: the original may change, or be a folder. */
  async #read(file) {
    const megabytes = file.size / 1e6;
    if (megabytes > this.maxMegabytes) {
      const size = megabytes.toFixed(1);
      throw new FileError(`${file.name} is ${size} MB; the limit is ${this.maxMegabytes} MB (--max-body-mb).`);
    }
    try {
      return new File([await file.arrayBuffer()], file.name || "clipboard", { type: file.type });
    } catch {
      throw new FileError(`${file.name} cannot be read. Choose a file, not a folder.`);
    }
  }

  /** Remove the document, or forget that it could not be read. */
  remove() {
    this.#restart();
    this.#clear();
    this.onChange();
  }

  /** Show another page. */
  turn(step) {
    this.index = Math.min(Math.max(this.index + step, 0), this.pages.length - 1);
    this.#show();
    this.refresh();
  }

  /** Fetch the views of this page with the current settings, shortly after the last change. */
  refresh() {
    if (!this.file) return; // open() calls this once the document is loaded
    const signal = this.#restart();
    this.timer = setTimeout(() => this.#plan(signal), DEBOUNCE_MS);
  }

  async #plan(signal) {
    const settings = readKnobs();
    const { index } = this;
    if (settings === null) return;
    const { width, height, preview } = this.pages[index];
    try {
      const { pages } = await fetchViews({ width, height, mm_processor_kwargs: settings }, null, signal);
      if (signal.aborted) return;
      this.pages[index] = { ...pages[0], preview };
      this.#show();
    } catch (error) {
      if (!signal.aborted) this.onError(error);
    }
  }

  #restart() {
    clearTimeout(this.timer);
    this.request.abort();
    this.request = new AbortController();
    return this.request.signal;
  }

  #clear() {
    for (const { preview } of this.pages) URL.revokeObjectURL(preview);
    Object.assign(this, { file: null, pages: [], count: 0, index: 0, reading: false, rejected: false });
    say(byId("document-error"), "");
    present("empty");
  }

  #show() {
    const page = this.pages[this.index];
    say(byId("document-error"), "");
    present("picture", "toolbar", "plan-figures");
    byId("name").textContent = `${this.file.name} · ${page.width} × ${page.height} pixels`;
    drawPicture(page);
    drawTiles(page);
    drawFigures(page);
    this.#showPager();
  }

  #showPager() {
    const last = this.pages.length;
    byId("pager").hidden = last < 2;
    byId("previous").disabled = this.index === 0;
    byId("next").disabled = this.index === last - 1;
    byId("page-text").textContent = `Page ${this.index + 1} of ${last}`;
    const shown = last < this.count ? `The first ${last} pages are shown. ` : "";
    say(byId("pages-note"), this.count < 2 ? "" : `${shown}The question is about all ${this.count} pages.`);
  }
}

/** Return a short URL for the content of a base64 data: URL; several elements show the same picture. */
function objectUrl(dataUrl) {
  const [header, content] = dataUrl.split(",");
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  return URL.createObjectURL(new Blob([bytes], { type: header.slice("data:".length).split(";")[0] }));
}

/** Show these parts of the document's section and hide the others. */
function present(...shown) {
  for (const id of ["empty", "loading", "picture", "toolbar", "plan-figures"]) byId(id).hidden = !shown.includes(id);
}

/** A file that cannot be sent to the server. */
export class FileError extends Error {}
