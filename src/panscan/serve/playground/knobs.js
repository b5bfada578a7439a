/** The pan-and-scan settings, each with a number field and a slider. */

import { clearFieldError, numberOf } from "./fields.js";
import { byId, html } from "./dom.js";

const SWITCH = "do_pan_and_scan";
const KNOBS = [
  { name: "pan_and_scan_max_num_crops", label: "Max crops", note: "per page", low: 1, high: 12, step: 1 },
  { name: "pan_and_scan_min_crop_size", label: "Min crop size", note: "pixels", low: 32, high: 1024, step: 32 },
  { name: "pan_and_scan_min_ratio_to_activate", label: "Min ratio", note: "long : short", low: 1, high: 4, step: 0.05 },
];

/** Create the controls; `onChange` is called whenever a value changes. */
export function buildKnobs(onChange) {
  byId("knob-grid").replaceChildren(...KNOBS.map((knob) => control(knob, onChange)));
  byId(SWITCH).addEventListener("change", () => {
    enable();
    onChange();
  });
}

function control({ name, label, note, low, high, step }, onChange) {
  const number = html("input", { id: name, type: "number", inputmode: "decimal", step: "any", "data-param": name });
  const slider = html("input", { type: "range", min: low, max: high, step, "aria-label": `${label} (slider)` });
  number.addEventListener("input", () => {
    slider.value = number.value;
    onChange();
  });
  slider.addEventListener("input", () => {
    number.value = slider.value;
    clearFieldError(number);
    onChange();
  });
  const caption = html("label", { for: name }, label, html("small", {}, note));
  return html("div", { class: "field knob" }, caption, number, slider);
}

function enable() {
  const off = !byId(SWITCH).checked;
  for (const input of byId("knob-grid").querySelectorAll("input")) input.disabled = off;
}

/** Set all controls from processor arguments. */
export function setKnobs(settings) {
  byId(SWITCH).checked = settings[SWITCH];
  for (const { name } of KNOBS) {
    const number = byId(name);
    clearFieldError(number);
    number.value = settings[name];
    number.parentElement.querySelector("[type=range]").value = settings[name];
  }
  enable();
}

/** Return the processor arguments; if a number is missing, show an error at the field and return null. */
export function readKnobs() {
  const settings = { [SWITCH]: byId(SWITCH).checked };
  for (const { name } of KNOBS) {
    settings[name] = numberOf(byId(name));
    if (settings[name] === null) return null;
  }
  return settings;
}

/** Lock pan and scan to on during a comparison with and without crops. */
export function lockSwitch(locked) {
  const input = byId(SWITCH);
  if (locked) input.checked = true;
  input.disabled = locked;
  enable();
}
