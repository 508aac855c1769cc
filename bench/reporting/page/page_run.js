// One run in a dialog: all of its row, from the blocks that the page carries as JSON. A run is opened by its anchor,
// so that a link to one can be shared.

const dialog = byId("run");
let unpackedDetails = null;

/** The blocks of a run, unpacked when the first one is opened; undefined if there is no such run. */
async function blocksOf(anchor) {
  unpackedDetails = unpackedDetails || unpacked("details").then(JSON.parse);
  const { runs, blocks } = await unpackedDetails;
  return Object.hasOwn(runs, anchor) ? runs[anchor].map((number) => blocks[number]) : undefined;
}

function factList(facts) {
  return element("dl", {}, ...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]));
}

function plainTable(block) {
  const head = element("tr", {}, ...block.columns.map((name) => element("th", { scope: "col" }, name)));
  const lines = block.rows.map((row) =>
    element("tr", {}, ...row.map((text, place) => (place ? element("td", {}, text) : element("th", { scope: "row" }, text)))),
  );
  return scrollable(element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)), block.title, "box");
}

/** A part that scrolls by itself, for the keyboard too. */
function scrollable(content, name, kind) {
  const box = element("div", { className: kind, tabIndex: 0 }, content);
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", name);
  return box;
}

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** The timed steps one after another, in milliseconds. */
function stepFigure(steps) {
  const [width, height, left, right, top, bottom] = [640, 150, 80, 12, 12, 32];
  const sorted = [...steps].sort((one, two) => one - two);
  const [low, high] = [sorted[0], sorted[sorted.length - 1]];
  const middle = sorted.length % 2 ? sorted[(sorted.length - 1) / 2] : (sorted[sorted.length / 2 - 1] + sorted[sorted.length / 2]) / 2;
  const x = (place) => left + (steps.length > 1 ? (place / (steps.length - 1)) * (width - left - right) : (width - left - right) / 2);
  const y = (value) => (high > low ? height - bottom - ((value - low) / (high - low)) * (height - top - bottom) : (height - bottom + top) / 2);
  const short = (value) => Number(value.toPrecision(3)).toLocaleString("en");
  const label = (text, at, anchor = "end") => svg("text", { ...at, "text-anchor": anchor, class: "axis" }, text);
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", class: "steps", "aria-label": `Times of ${steps.length} steps in milliseconds: from ${short(low)} to ${short(high)}, median ${short(middle)}.` },
    svg("line", { x1: left, x2: width - right, y1: y(middle), y2: y(middle), class: "median" }),
    ...steps.map((value, place) => svg("circle", { cx: x(place), cy: y(value), r: 3.5, class: "step" })),
    label(`${short(high)} ms`, { x: left - 8, y: y(high) + 4 }),
    label("first step", { x: left, y: height - 6 }, "start"),
    label("last", { x: width - right, y: height - 6 }),
  );
  if (high > low) drawing.append(label(`${short(low)} ms`, { x: left - 8, y: y(low) + 4 }));
  return drawing;
}

function shownBlock(block) {
  const parts = [element("h3", {}, block.title)];
  if (block.steps) parts.push(stepFigure(block.steps));
  if (block.facts) parts.push(factList(block.facts));
  if (block.columns) parts.push(plainTable(block));
  if (block.text !== undefined) {
    const text = element("pre", { tabIndex: 0 }, block.text);
    text.setAttribute("role", "region");
    text.setAttribute("aria-label", block.title);
    parts.push(text);
  }
  return element("section", {}, ...parts);
}

async function open(anchor) {
  const blocks = await blocksOf(anchor);
  if (!blocks) return;
  byId("run-title").textContent = `Run ${anchor.replace(/^run-|-\d+$/g, "")}`;
  byId("run-body").replaceChildren(...blocks.map(shownBlock));
  const shown = shownRuns();
  const place = shown.indexOf(anchor);
  [["run-before", shown[place - 1]], ["run-after", place < 0 ? undefined : shown[place + 1]]].forEach(([id, other]) => {
    byId(id).disabled = !other;
    byId(id).onclick = () => show(other);
  });
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

/** Open a run and name it in the address, without another step back in the history. */
function show(anchor) {
  history.replaceState(null, "", `#${anchor}`);
  open(anchor);
}

function openAddressed() {
  const anchor = decodeURIComponent(location.hash.slice(1));
  if (anchor.startsWith("run-")) open(anchor);
  else if (dialog.open) dialog.close();
}

byId("run-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close(); // the backdrop
});
dialog.addEventListener("close", () => {
  if (location.hash.startsWith("#run-")) history.replaceState(null, "", location.href.split("#")[0]);
});
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#run-"]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  show(link.hash.slice(1));
});
body.addEventListener("click", (event) => {
  if (event.target.closest("a, button, details") || String(getSelection())) return;
  const row = event.target.closest("tr");
  if (row) show(row.id);
});
window.addEventListener("hashchange", openAddressed);
openAddressed();
