/** The page with its views outlined, and the square that the model reads for each view. */

import { byId, count, html, svg, terms } from "./dom.js";

const MAX_TILES = 24; // Thousands of crops are possible; the picture shows them all, the tiles the first ones.
const COLOURS = 5;

function className(index) {
  return index === 0 ? "whole" : `crop c${((index - 1) % COLOURS) + 1}`;
}

function boxOf(view) {
  const [left, top, right, bottom] = view.box;
  return { x: left, y: top, width: right - left, height: bottom - top };
}

/** Draw the page with an outline per view. */
export function drawPicture(page) {
  const picture = byId("views");
  const title = byId("views-title");
  const crops = page.views.length - 1;
  title.textContent = `Page of ${page.width} × ${page.height} pixels with ${crops ? count(crops, "crop") : "no crops"}`;
  const [width, height] = frame(picture, page);
  picture.style.aspectRatio = `${width} / ${height}`;
  picture.style.setProperty("--ratio", width / height);
  byId("picture").classList.toggle("tall", height > 1.25 * width);
  picture.replaceChildren(title, imageOf(page), ...page.views.map(outline), ...badges(page));
}

function imageOf({ preview, width, height }) {
  return svg("image", { href: preview, width, height, preserveAspectRatio: "none" });
}

function outline(view, index) {
  return svg("rect", { class: className(index), "data-view": index, ...boxOf(view) });
}

/** Return the size of a crop's number in page pixels; it shrinks if there are many crops. */
function badgeSize(page) {
  return Math.max(page.width, page.height) / Math.max(26, 1.3 * page.views.length);
}

/** Set the drawing's coordinates: the page, with the crop numbers beside it. Return its width and height. */
function frame(picture, page) {
  const margin = page.views.length > 1 ? 1.6 * badgeSize(page) : 0;
  const stacked = page.height > page.width;
  const [left, top] = stacked ? [margin, 0] : [0, margin];
  const [width, height] = [page.width + 2 * left, page.height + top];
  picture.setAttribute("viewBox", `${-left} ${-top} ${width} ${height}`);
  return [width, height];
}

function badges(page) {
  const size = badgeSize(page);
  const stacked = page.height > page.width;
  return page.views.slice(1).flatMap((view, at) => {
    const { x, y } = boxOf(view);
    const [left, top] = stacked ? [x - 1.5 * size, y] : [x, y - 1.5 * size];
    const box = { x: left, y: top, width: size * 1.15, height: size * 1.15, rx: size * 0.25 };
    const middle = { x: box.x + box.width / 2, y: box.y + box.height / 2, "font-size": size * 0.8 };
    const name = `badge ${className(at + 1)}`;
    return [svg("rect", { class: name, ...box }), svg("text", { class: "badge", ...middle }, String(at + 1))];
  });
}

/** Show what the model reads: one square per view. Pointing at a square emphasises its outline. */
export function drawTiles(page) {
  const tiles = page.views.slice(0, MAX_TILES).map((view, index) => tile(page, view, index));
  const rest = page.views.length - MAX_TILES;
  if (rest > 0) tiles.push(html("li", { class: "more" }, `+ ${count(rest, "more view")}`));
  byId("tiles").replaceChildren(...tiles);
  emphasise(null); // a replaced square never fires pointerleave
}

function tile(page, view, index) {
  const { x, y, width, height } = boxOf(view);
  const name = index === 0 ? "Whole" : `Crop ${index}`;
  const drawing = svg(
    "svg",
    { viewBox: `${x} ${y} ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    imageOf(page),
  );
  const label = html("span", {}, name, html("small", {}, `${width} × ${height}`));
  const item = html("li", { class: className(index) }, drawing, label);
  item.addEventListener("pointerenter", () => emphasise(index));
  item.addEventListener("pointerleave", () => emphasise(null));
  return item;
}

function emphasise(index) {
  const picture = byId("views");
  picture.classList.toggle("emphasis", index !== null);
  for (const rect of picture.querySelectorAll("[data-view]")) {
    rect.classList.toggle("on", index !== null && rect.dataset.view === String(index));
  }
}

/** Show the number of views and tokens of the page. */
export function drawFigures(page) {
  const crops = page.views.length - 1;
  byId("plan-figures").replaceChildren(
    ...terms([
      ["Views", String(page.views.length)],
      ["Crops", String(crops)],
      ["Image tokens", page.image_tokens.toLocaleString("en")],
      ["Prompt tokens", page.prompt_tokens.toLocaleString("en")],
    ]),
  );
}
