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

/** What the table says of a run, where the page has no details of its own; undefined if there is no such run. */
function blocksOfLine(anchor) {
  const run = runs.find((one) => one.anchor === anchor);
  if (!run) return undefined;
  const facts = headings.map((heading, column) => [heading.dataset.title, run.cells[column].text]);
  return [
    { title: "In the table", facts: facts.filter(([, text]) => text !== "–") },
    { title: "The rest", text: `This report has many runs. All that is known of this one is in its row, ${run.id}.` },
  ];
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
  await ready;
  const blocks = (await blocksOf(anchor)) || blocksOfLine(anchor);
  if (!blocks) return;
  byId("run-title").textContent = `Run ${anchor.replace(/^run-|-\d+$/g, "")}`;
  byId("run-body").replaceChildren(...blocks.map(shownBlock));
  await ready;
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
  history.replaceState(null, "", `${location.search}#${anchor}`);
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
  const link = event.target.closest('a[href^="#run-"]:not([data-runs])');
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

// Two machines side by side: of all pairs that the page holds, the one that was chosen.

const pairForm = byId("pair");
if (pairForm) {
  const pairs = [...document.querySelectorAll("details.pair")];
  const showPair = () => {
    const chosen = [byId("pair-first").value, byId("pair-second").value];
    let found = null;
    for (const pair of pairs) {
      const here = chosen.includes(pair.dataset.first) && chosen.includes(pair.dataset.second) && chosen[0] !== chosen[1];
      pair.hidden = !here;
      pair.open = here;
      if (here) found = pair;
    }
    byId("pair-said").textContent = found
      ? `${found.dataset.second} is compared with ${found.dataset.first}: a change is what ${found.dataset.second} takes beyond ${found.dataset.first}.`
      : "Choose two different machines.";
  };
  pairForm.addEventListener("input", showPair);
  pairForm.addEventListener("submit", (event) => event.preventDefault());
  pairForm.hidden = false;
  showPair();
}

// Interactive figures. plotly.js lies compressed in the page and is unpacked when the first figure comes near.

const frames = [...document.querySelectorAll("figure.chart")];
const settings = {
  displaylogo: false,
  responsive: true,
  scrollZoom: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]], // none that asks a server
  toImageButtonOptions: { format: "svg", filename: "figure" },
};
let plotly = null;

/** plotly.js, unpacked and started once. */
function loaded() {
  plotly = plotly || unpacked("library").then((text) => {
    document.head.append(element("script", { textContent: text }));
    return window.Plotly;
  });
  return plotly;
}

/** The points of a trace whose runs are shown; with none of them, its name in the legend remains. */
function picked(trace, shown) {
  if (!trace.customdata) return trace;
  if (!trace.customdata.some((anchor) => shown.has(anchor))) return { ...trace, x: [null], y: [null], customdata: null };
  const places = trace.customdata.map((_, place) => place).filter((place) => shown.has(trace.customdata[place]));
  const some = (values) => places.map((place) => values[place]);
  return { ...trace, x: some(trace.x), y: some(trace.y), text: some(trace.text), customdata: some(trace.customdata) };
}

/** The layout with room for the legend below the axis, in as many columns as the width has room for. */
function fitted(layout, traces, width) {
  const [plotHeight, axisHeight, lineHeight] = [320, 62, 29];
  const names = traces.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
  const nameWidth = Math.min(Math.max(...names.map((name) => name.length)) * 6.8, width - 130);
  const columns = Math.max(1, Math.floor((width - 80) / (nameWidth + 50)));
  const legendHeight = lineHeight * Math.ceil(names.length / columns) + 16;
  const margin = { ...layout.margin, b: axisHeight + legendHeight };
  const legend = { ...layout.legend, y: -axisHeight / plotHeight, entrywidth: nameWidth, entrywidthmode: "pixels" };
  return { ...layout, height: margin.t + plotHeight + margin.b, margin, legend };
}

async function draw(frame, charts) {
  const plot = frame.querySelector(".plot");
  const chart = charts[frame.querySelector("select").value || 0];
  const library = await loaded();
  frame.querySelector(".wait")?.remove();
  await ready;
  const shown = new Set(shownRuns());
  const { data, layout } = chart.spec;
  const traces = chart.group === "explorer" ? data.map((trace) => picked(trace, shown)) : data;
  plot.setAttribute("aria-label", chart.alt);
  await library.react(plot, structuredClone(traces), fitted(structuredClone(layout), data, plot.clientWidth), settings);
  if (plot.dataset.ready) return;
  plot.dataset.ready = "yes";
  plot.on("plotly_click", ({ points }) => {
    const anchor = points[0].customdata;
    if (anchor) show(anchor);
  });
}

async function start() {
  const all = JSON.parse(await unpacked("charts"));
  for (const frame of frames) {
    const charts = all.filter((chart) => chart.group === frame.dataset.group);
    const select = frame.querySelector("select");
    charts.forEach((chart, place) => select.append(new Option(chart.title, place)));
    frame.querySelector(".chart-head").hidden = false;
    const failed = (error) => {
      frame.querySelector(".plot").textContent = `This figure cannot be drawn by this browser (${error.message}); the static ones below show the same.`;
    };
    const redraw = () => draw(frame, charts).catch(failed);
    const watcher = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      select.addEventListener("input", redraw);
      if (frame.dataset.group === "explorer") document.addEventListener("runs-shown", redraw);
      redraw();
    }, { rootMargin: "300px" });
    watcher.observe(frame);
  }
}

if (frames.length) start();

// The static figures: SVG that the page carries compressed, without the outlines of characters, which it has once.
// They are unpacked one after another in the order of the page; those that lie folded away when they are unfolded.

const unpackedFigures = document.querySelector("img[data-figure]") && unpacked("figures").then(JSON.parse);

/** A figure as the text of an SVG file, with the outlines of the characters that it uses. */
function figureText({ glyphs, figures }, name) {
  const [text, used] = figures[name];
  const outlines = used.map((id) => `<path id="${id}" ${glyphs[id]}/>`).join("");
  return text.replace("<defs>", `<defs>${outlines}`);
}

async function showFigures(images) {
  for (const image of images) {
    const text = figureText(await unpackedFigures, image.dataset.figure);
    image.src = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  }
}

const folded = [...document.querySelectorAll("details.more-figures")];
for (const part of folded) {
  part.addEventListener("toggle", () => showFigures(part.querySelectorAll("img[data-figure]")), { once: true });
}
showFigures([...document.querySelectorAll("img[data-figure]")].filter((image) => !image.closest("details.more-figures")));
