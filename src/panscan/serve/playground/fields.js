/** Error messages next to their fields. */

import { byId, html } from "./dom.js";

function messageId(field) {
  return `${field.id}-error`;
}

/** Show an error next to its field, also to screen readers. */
export function showFieldError(field, message) {
  clearFieldError(field);
  const text = html("p", { id: messageId(field), class: "field-error", role: "alert" }, message);
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", text.id);
  (field.closest(".options, #knob-grid") ?? field).after(text); // a row of narrow fields has no room for it
}

/** Remove the error of a field. */
export function clearFieldError(field) {
  if (!field.hasAttribute("aria-invalid")) return;
  byId(messageId(field))?.remove();
  field.removeAttribute("aria-invalid");
  field.removeAttribute("aria-describedby");
}

/** Remove the errors of all fields. */
export function clearFieldErrors() {
  for (const field of document.querySelectorAll("[aria-invalid]")) clearFieldError(field);
}

/**
 * Return the field that caused a server error; null if it is not on the page.
 *
 * The server names the field by its path, such as `response_format.json_schema`. Only the
 * message names a schema that the model cannot follow, and the pan-and-scan setting that is invalid.
 *
 * @param {ApiError} error
 */
export function fieldOf({ param, message }) {
  const fields = [...document.querySelectorAll("[data-param]")];
  for (const name of [...(param ?? "").split(".").reverse(), ...(message.match(/pan_and_scan_\w+|json_schema/g) ?? [])]) {
    const field = fields.find((each) => each.dataset.param.split(" ").includes(name));
    if (field) return field;
  }
  return null;
}

/** Return the number in a field; if there is none, show an error and return null. */
export function numberOf(field) {
  const value = field.valueAsNumber;
  if (Number.isFinite(value)) return value;
  showFieldError(field, "Enter a number.");
  return null;
}

// An error is outdated as soon as its field changes.
document.addEventListener("input", ({ target }) => clearFieldError(target));
