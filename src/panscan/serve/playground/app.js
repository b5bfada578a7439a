/** The playground: choose a document, adjust the settings, ask questions, and inspect the timings. */

import { AnswerCard, showCards, showStages } from "./answers.js";
import { ApiError, ATTACHED, baseUrl, streamAnswer } from "./api.js";
import { Connection } from "./connection.js";
import { Documents, FileError } from "./document.js";
import { byId, say } from "./dom.js";
import { clearFieldErrors, fieldOf, numberOf, showFieldError } from "./fields.js";
import { buildKnobs, lockSwitch, readKnobs, setKnobs } from "./knobs.js";

const SAMPLE = "playground/sample.png";
const SAMPLE_QUESTION = "What is the total?";

const connection = new Connection(showModel);
const documents = new Documents({ onError: showDocumentError, onChange: showDocument });
let defaults = null;
let running = null; // AbortController of the question that is being answered

function showModel(model) {
  const { reads_images: readsImages, pan_and_scan: settings, limits, demonstration } = model.panscan;
  say(byId("caution"), demonstration ? cautionOf(model) : "");
  documents.maxMegabytes = limits.max_body_mb;
  byId("max_tokens").max = limits.max_output_tokens;
  if (defaults === null) setKnobs(settings);
  defaults = settings;
  byId("knobs").hidden = !readsImages;
  byId("file").disabled = byId("sample").disabled = !readsImages;
  document.body.classList.toggle("text-only", !readsImages);
  say(byId("text-only"), readsImages ? "" : `${model.id} reads text only. Ask a question without a document.`);
}

function cautionOf({ id, root }) {
  const why =
    root === "tiny"
      ? "Its weights are random, and its answers mean nothing."
      : "It reads panscan's own sample documents (panscan samples); about other documents its answers are usually wrong.";
  return `${id} is a demonstration model. ${why} Serve another model with --model, such as google/gemma-3-4b-it.`;
}

function showDocument() {
  const present = documents.file !== null;
  byId("dismiss").hidden = !documents.rejected;
  say(byId("ask-error"), "");
  byId("compare").disabled = !present;
  byId("compare").title = present ? "" : "Choose a document first.";
  if (!present) byId("compare").checked = false;
  lockSwitch(byId("compare").checked);
}

function showDocumentError(error) {
  if (error instanceof ApiError && connection.report(error)) return;
  const field = fieldOf(error);
  if (field && field.id !== "drop") showFieldError(field, error.message);
  else say(byId("document-error"), error.message);
}

/** Return the request body; if a field is invalid, show an error at the field and return null. */
function readQuestion() {
  const question = byId("question").value.trim();
  if (!question) return invalid("question", "Enter a question.");
  if (documents.reading) {
    say(byId("ask-error"), "The document is still being read. Ask again when it is shown.");
    return null;
  }
  if (documents.rejected) {
    say(byId("ask-error"), "The document could not be read, so nothing was asked. Choose another, or go on without one.");
    return null;
  }
  const body = { stream_options: { include_usage: true } };
  body.max_tokens = numberOf(byId("max_tokens"));
  body.temperature = numberOf(byId("temperature"));
  const settings = documents.file ? readKnobs() : {};
  if (body.max_tokens === null || body.temperature === null || settings === null) return null;
  const schema = byId("schema").value.trim();
  if (schema) {
    const parsed = parsedSchema(schema);
    if (!parsed) return null;
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed, strict: true } };
  }
  const text = { type: "text", text: question };
  const image = { type: "image_url", image_url: { url: ATTACHED } };
  body.messages = [{ role: "user", content: documents.file ? [image, text] : [text] }];
  if (documents.file) body.mm_processor_kwargs = settings;
  return body;
}

function parsedSchema(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    byId("schema").closest("details").open = true;
    return invalid("schema", `The schema is not valid JSON: ${error.message}`);
  }
}

function invalid(id, message) {
  showFieldError(byId(id), message);
  byId(id).focus();
  return null;
}

/** Return the questions as [title, body] pairs; they run one at a time so that neither slows the other. */
function plannedQuestions(body) {
  if (!byId("compare").checked) return [["", body]];
  return [false, true].map((enabled) => [
    enabled ? "With crops" : "Without crops",
    { ...body, mm_processor_kwargs: { ...body.mm_processor_kwargs, do_pan_and_scan: enabled } },
  ]);
}

async function ask() {
  if (running) return;
  clearFieldErrors();
  say(byId("ask-error"), "");
  const body = readQuestion();
  if (body === null) return;
  const questions = plannedQuestions(body);
  const cards = questions.map(([title]) => new AnswerCard(title));
  showCards(cards);
  setRunning(new AbortController());
  const { file } = documents;
  let outcome = "Answer complete.";
  for (const [index, [, question]] of questions.entries()) {
    outcome = await answer(cards[index], question, file);
    if (outcome !== "Answer complete.") break;
  }
  const shown = cards.filter((card) => card.started);
  showCards(shown);
  showStages(shown);
  setRunning(null);
  byId("status").textContent = outcome;
}

/** Stream one answer into its card; return the outcome as text. */
async function answer(card, body, file) {
  const { signal } = running;
  try {
    for await (const chunk of streamAnswer(body, file, signal)) card.add(chunk);
    card.finish();
    return "Answer complete.";
  } catch (error) {
    if (signal.aborted) {
      card.started = true;
      card.finish("Stopped.");
      return "Stopped.";
    }
    if (!(error instanceof ApiError)) throw error;
    showAskError(card, error);
    return "The request failed.";
  }
}

function showAskError(card, error) {
  const shared = connection.report(error);
  const field = fieldOf(error);
  if (field && !card.text) card.started = false;
  if (card.started) {
    card.fail(error.message);
    connection.connect(); // shows whether the server is still there
    return;
  }
  if (field?.id === "drop") say(byId("document-error"), error.message);
  else if (field) {
    const details = field.closest("details");
    if (details) details.open = true;
    invalid(field.id, error.message);
  } else if (!shared) say(byId("ask-error"), error.message);
}

function setRunning(controller) {
  running = controller;
  // aria-disabled keeps the focus, unlike disabled.
  byId("submit").setAttribute("aria-disabled", String(running !== null));
  if (running === null && document.activeElement === byId("stop")) byId("submit").focus();
  byId("stop").hidden = running === null;
  if (running) byId("status").textContent = "Asking…";
}

async function openSample() {
  if (!byId("question").value.trim()) byId("question").value = SAMPLE_QUESTION;
  try {
    const response = await fetch(SAMPLE);
    if (!response.ok) throw new Error();
    await documents.open(new File([await response.blob()], "sample.png", { type: "image/png" }));
  } catch {
    documents.reject(new ApiError(0, "The sample cannot be loaded: the server does not answer."));
  }
}

function openOnly(files) {
  if (byId("file").disabled) return;
  if (files.length === 1) documents.open(files[0]);
  else if (files.length > 1) documents.reject(new FileError(`Choose one file at a time; got ${files.length}.`));
}

function hasFiles({ dataTransfer }) {
  return dataTransfer.types.includes("Files");
}

function listenForFiles() {
  byId("file").addEventListener("change", ({ target }) => {
    openOnly([...target.files]);
    target.value = ""; // so that the same file can be chosen again
  });
  window.addEventListener("paste", ({ clipboardData }) => {
    // Spreadsheets and word processors add a picture to copied text.
    if (!clipboardData.types.includes("text/plain")) openOnly([...clipboardData.files]);
  });
  window.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  window.addEventListener("dragleave", ({ relatedTarget }) => {
    if (relatedTarget === null) document.body.classList.remove("dragging");
  });
  window.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.body.classList.remove("dragging");
    openOnly([...event.dataTransfer.files]);
  });
}

function listen() {
  listenForFiles();
  byId("sample").addEventListener("click", openSample);
  for (const id of ["remove", "dismiss"]) {
    byId(id).addEventListener("click", () => {
      documents.remove();
      byId("file").focus();
    });
  }
  byId("previous").addEventListener("click", () => documents.turn(-1));
  byId("next").addEventListener("click", () => documents.turn(1));
  byId("reset").addEventListener("click", () => {
    if (defaults === null) return;
    setKnobs(defaults);
    lockSwitch(byId("compare").checked);
    documents.refresh();
  });
  byId("compare").addEventListener("change", ({ target }) => {
    lockSwitch(target.checked);
    documents.refresh();
  });
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
  });
}

if (/Mac|iPhone|iPad/.test(navigator.platform)) byId("shortcut").textContent = "⌘ + Enter";
byId("base").textContent = baseUrl;
buildKnobs(() => documents.refresh());
showDocument();
listen();
connection.connect();
