/** Helpers for building and finding elements. Text is only ever set as text, never parsed as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/** Return the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Create an HTML element with attributes and children (elements or strings). */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element with attributes and children. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Show a message in an element and unhide it; an empty message hides it. */
export function say(element, message) {
  element.textContent = message;
  element.hidden = !message;
}

/** Return term and description elements for a definition list, from [term, description] pairs. */
export function terms(pairs) {
  return pairs.map(([term, text]) => html("div", {}, html("dt", {}, term), html("dd", {}, text)));
}

/** Return a duration in milliseconds as text with three significant digits; a dash if it is unknown. */
export function milliseconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ms`;
}

/** Return "1 view", "3 views". */
export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}
