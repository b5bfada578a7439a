/** The server's HTTP interface: requests with a deadline, errors with their field, and server-sent events. */

const BASE = new URL("v1/", document.baseURI);
const KEY = "panscan-api-key";
const DEADLINE_MS = 60_000;

/** The address that OpenAI clients take as base_url. */
export const baseUrl = BASE.href.replace(/\/$/, "");

/** An error response of the server, an incomplete answer (status 200), or no response at all (status 0). */
export class ApiError extends Error {
  /**
   * @param {number} status HTTP status; 0 if the server cannot be reached.
   * @param {string} message the reason, shown to the user.
   * @param {string|null} param the path of the field at fault.
   */
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Keep the API key for this tab. */
export function setKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Storage is disabled: the key is lost when the page is closed.
  }
  currentKey = key;
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

let currentKey = storedKey();

function unreachable() {
  return new ApiError(0, `The server at ${BASE.host} cannot be reached. Check that panscan serve is running.`);
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const reason = body?.error?.message ?? `The server returned ${response.status} ${response.statusText}`.trim();
  const wait = response.headers.get("retry-after");
  const retry = wait ? ` Try again in ${wait} s.` : "";
  return new ApiError(response.status, `${reason.replace(/[.\s]*$/, "")}.${retry}`, body?.error?.param ?? null);
}

async function send(url, options) {
  const headers = { ...options.headers };
  if (currentKey) headers.Authorization = `Bearer ${currentKey}`;
  let response;
  try {
    response = await fetch(url, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new ApiError(0, "The server did not answer within 60 s. Try again.");
    throw unreachable();
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Return the body and headers of a request; a file is uploaded with the JSON as the field `image`. */
function payload(body, file) {
  if (!file) return { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  const form = new FormData();
  form.append("request", JSON.stringify(body));
  form.append("image", file, file.name || "image");
  return { body: form };
}

/** The URL by which a request references its uploaded file. */
export const ATTACHED = "attachment:image";

/** Resolve if the model can answer; otherwise throw an ApiError with the reason. */
export async function checkReady() {
  await send(new URL("../ready", BASE), { signal: AbortSignal.timeout(DEADLINE_MS) });
}

/** Return the description of the served model. */
export async function fetchModel() {
  const response = await send(new URL("models", BASE), { signal: AbortSignal.timeout(DEADLINE_MS) });
  return (await response.json()).data[0];
}

/**
 * Return {pages, page_count} of a document, or of a page size; each page has its views and token counts. For a
 * long document, the server returns only the first pages.
 *
 * @param {object} body fields of POST /v1/views.
 * @param {File|null} file the document, if the body refers to it.
 * @param {AbortSignal} signal cancels the request.
 */
export async function fetchViews(body, file, signal) {
  const limit = AbortSignal.any([signal, AbortSignal.timeout(DEADLINE_MS)]);
  const response = await send(new URL("views", BASE), { method: "POST", signal: limit, ...payload(body, file) });
  return response.json();
}

/**
 * Ask a question and yield the chunks of the streamed answer.
 *
 * The server limits how long an answer may take (--request-timeout).
 *
 * @param {object} body fields of POST /v1/chat/completions.
 * @param {File|null} file the document, if the body refers to it.
 * @param {AbortSignal} signal cancels the request.
 */
export async function* streamAnswer(body, file, signal) {
  const options = { method: "POST", signal, ...payload({ ...body, stream: true }, file) };
  const response = await send(new URL("chat/completions", BASE), options);
  const incomplete = new ApiError(200, "The connection closed before the answer was complete.");
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(200, chunk.error.message, chunk.error.param ?? null);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw incomplete;
  }
  throw incomplete;
}

/** Yield the data of each server-sent event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // The stream may already have failed; its error was raised by read().
  }
}
