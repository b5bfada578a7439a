/** Answer cards: the streamed text, then tokens, latencies and the stages of the request. */

import { byId, html, milliseconds, svg, terms } from "./dom.js";

const STAGES = ["load", "preprocess", "queue", "vision", "prefill", "decode"]; // The same order as in reports.
const REASONS = { length: "Cut off at the maximum number of tokens." };

/** One answer: streams its text, then shows its figures. */
export class AnswerCard {
  /** @param {string} title title of the card; empty if it is the only one. */
  constructor(title) {
    this.text = "";
    this.started = false; // whether the server accepted the question
    this.usage = null;
    this.timing = null;
    this.reason = null;
    this.output = html("p", {
      class: "answer",
      "aria-live": "polite",
      "aria-busy": "true",
      "aria-label": title || "Answer",
    });
    this.note = html("p", { class: "note", hidden: "" });
    this.error = html("p", { class: "field-error", role: "alert", hidden: "" });
    this.figures = html("dl", { class: "figures", hidden: "" });
    this.stages = html("div", { class: "stages", hidden: "" });
    const heading = title ? [html("h3", {}, title)] : [];
    this.element = html(
      "article",
      { class: "card" },
      ...heading,
      this.output,
      this.note,
      this.error,
      this.figures,
      this.stages,
    );
  }

  /** Add a chunk of the stream. */
  add(chunk) {
    this.started = true;
    const [choice] = chunk.choices ?? [];
    if (choice?.delta?.content) {
      this.text += choice.delta.content;
      this.output.textContent = this.text;
    }
    this.reason = choice?.finish_reason ?? this.reason;
    this.usage = chunk.usage ?? this.usage;
    this.timing = chunk.panscan ?? this.timing;
  }

  /** End the stream: show the figures, and a note if the answer is incomplete. */
  finish(note = REASONS[this.reason] ?? "") {
    this.output.setAttribute("aria-busy", "false");
    if (!this.text && !note) note = "The model returned an empty answer.";
    this.note.textContent = note;
    this.note.hidden = !note;
    if (this.usage) this.#showFigures();
  }

  /** End the stream with an error. */
  fail(message) {
    this.error.textContent = message;
    this.error.hidden = false;
    this.finish(this.text ? "The answer is incomplete." : " ");
    if (!this.text) this.output.hidden = this.note.hidden = true;
  }

  /** End-to-end latency, ms; 0 if unknown. */
  get e2e() {
    return this.timing?.e2e_ms ?? 0;
  }

  #showFigures() {
    const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = this.usage;
    const timing = this.timing ?? {};
    const pairs = [
      ["Views", String(timing.views ?? this.usage.views ?? "–")],
      ["Image tokens", (details?.image_tokens ?? 0).toLocaleString("en")],
      ["Prompt tokens", prompt.toLocaleString("en")],
      ["Cached tokens", (details?.cached_tokens ?? 0).toLocaleString("en")],
      ["Output tokens", output.toLocaleString("en")],
      ["TTFT", milliseconds(timing.ttft_ms)],
      ["TPOT", milliseconds(timing.tpot_ms)],
      ["E2E", milliseconds(timing.e2e_ms)],
    ];
    this.figures.replaceChildren(...terms(pairs));
    this.figures.hidden = false;
  }

  /** Draw the stages as a stacked bar; `longest` is the latency (ms) that fills the width. */
  showStages(longest) {
    const stages = this.timing?.stages_ms;
    if (!stages || !(longest > 0)) return;
    const seen = STAGES.map((name, index) => ({ name, index, ms: stages[name] })).filter(({ ms }) => ms > 0);
    let left = 0;
    const bars = seen.map(({ name, index, ms }) => {
      const width = (100 * ms) / longest;
      const bar = svg(
        "rect",
        { class: `stage${index}`, x: left, width, height: 10 },
        svg("title", {}, `${name} ${milliseconds(ms)}`),
      );
      left += width;
      return bar;
    });
    const described = seen.map(({ name, ms }) => `${name} ${milliseconds(ms)}`).join(", ");
    const bar = svg(
      "svg",
      {
        class: "bar",
        viewBox: "0 0 100 10",
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `Stages: ${described}`,
      },
      ...bars,
    );
    const legend = STAGES.map((name, index) => ({ name, index, ms: stages[name] })).map(({ name, index, ms }) =>
      html("li", {}, swatch(index), html("span", {}, name), html("span", { class: "value" }, milliseconds(ms))),
    );
    this.stages.replaceChildren(bar, html("ul", {}, ...legend));
    this.stages.hidden = false;
  }
}

function swatch(index) {
  return svg(
    "svg",
    { class: "swatch", viewBox: "0 0 1 1", "aria-hidden": "true" },
    svg("rect", { class: `stage${index}`, width: 1, height: 1 }),
  );
}

/** Replace the shown answers with these cards. */
export function showCards(cards) {
  const answers = byId("answers");
  answers.classList.toggle("pair", cards.length > 1);
  answers.replaceChildren(...cards.map((card) => card.element));
  byId("answers-empty").hidden = cards.length > 0;
}

/** Draw the stages of all cards on one scale. */
export function showStages(cards) {
  const longest = Math.max(...cards.map((card) => card.e2e));
  for (const card of cards) card.showStages(longest);
}
