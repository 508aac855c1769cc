"use strict";
// The table of all runs: sorting by a heading, filtering by words and choices, a page at a time.

const byId = (id) => document.getElementById(id);

/** An element with properties and children; texts become text nodes, never markup. */
function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** What the page carries compressed (gzip in base64), as text. */
async function unpacked(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

document.documentElement.classList.add("js");

// ---- what is selected, in the address: so that a link shows what its sender saw

const address = new URLSearchParams(location.search);

/** Note a selection in the address, or with an empty value that there is none, without a step back in the history. */
function remember(name, value) {
  if (value) address.set(name, value);
  else address.delete(name);
  const query = String(address).replaceAll("%2C", ",");
  history.replaceState(null, "", `${location.pathname}${query && "?"}${query}${location.hash}`);
}

// ---- the table of all runs: of many the first are shown, and more when they are asked for

const PAGE_ROWS = 100;
const table = byId("runs-table");
const body = table.tBodies[0];
const headings = [...table.tHead.rows[0].cells];
const isNumeric = headings.map((heading) => heading.classList.contains("number") || "rank" in heading.dataset);
const collator = new Intl.Collator("en", { numeric: true });
let runs = []; // all, as the page lists them
let order = []; // all, as they are sorted
let fitting = []; // those that the filters let through, as they are sorted
let limit = PAGE_ROWS;

/** A cell as it is packed: its text, and a number, a word or null by which it is sorted. */
function unpackedCell(packed, column) {
  const [text, sorted] = Array.isArray(packed) ? packed : [packed, undefined];
  if (column === headings.length - 1) return { text, value: text };
  if (sorted === undefined && text === "–") return { text, value: null };
  const value = sorted === undefined ? text : sorted;
  return { text, value: isNumeric[column] && value !== null ? Number(String(value).replaceAll(",", "")) : value };
}

function unpackedRun([anchor, id, spoken, found, cells]) {
  const all = [...cells, id].map(unpackedCell);
  return { anchor, id, spoken, cells: all, searched: [...all.map(({ text }) => text), found].join(" ").toLowerCase() };
}

function rowOf(run) {
  const row = element("tr", { id: run.anchor });
  run.cells.forEach(({ text, value }, column) => {
    const heading = headings[column].dataset;
    if (column === 0) {
      const link = element("a", { href: `#${run.anchor}` }, text, element("span", { className: "spoken" }, ` ${run.spoken}`));
      row.append(element("th", { scope: "row" }, link));
    } else if (column === run.cells.length - 1) {
      row.append(element("td", { className: "short" }, element("code", {}, text)));
    } else {
      const kind = headings[column].classList.contains("number") ? "number" : "long" in heading ? "long" : "short";
      row.append(element("td", { className: "status" in heading ? `${kind} status-${value}` : kind }, text));
    }
  });
  return row;
}

/** Anchors of the runs that the filters let through, in the order of the table. */
function shownRuns() {
  return fitting.map((run) => run.anchor);
}

const more = byId("more-runs");

function arrange() {
  body.replaceChildren(...fitting.slice(0, limit).map(rowOf));
  const hidden = fitting.length - limit;
  more.hidden = hidden <= 0;
  more.textContent = `Show ${Math.min(hidden, PAGE_ROWS)} more of ${hidden}`;
}

more.addEventListener("click", () => {
  limit += PAGE_ROWS;
  arrange();
});

function compare(one, two) {
  return typeof one === "number" && typeof two === "number" ? one - two : collator.compare(String(one), String(two));
}

/** Sort by a column, by none for -1: runs without a value come last either way, equal ones stay as they were. */
function sortBy(column, descending) {
  if (column < 0) order = [...runs];
  else {
    order.sort(({ cells: first }, { cells: second }) => {
      const [one, two] = [first[column].value, second[column].value];
      if (one === null || two === null) return (one === null) - (two === null);
      return descending ? compare(two, one) : compare(one, two);
    });
  }
  headings.forEach((heading, index) => {
    if (index === column) heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else heading.removeAttribute("aria-sort");
  });
  remember("sort", column < 0 ? "" : `${descending ? "-" : ""}${headings[column].dataset.title}`);
}

// ---- filters

const filters = byId("filters");
const words = byId("filter-text");
const choices = []; // a list to choose from, the name of its filter, and what it compares of a run
let chosenRuns = null; // the anchors of a finding's runs

function filter() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = choices.filter(([select]) => select.value);
  fitting = order.filter(
    (run) =>
      (!chosenRuns || chosenRuns.has(run.anchor)) &&
      wanted.every((word) => run.searched.includes(word)) &&
      chosen.every(([select, , textOf]) => textOf(run) === select.value),
  );
  limit = PAGE_ROWS;
  arrange();
  const [all, count] = [runs.length, fitting.length];
  const of = chosenRuns ? ", those of a finding" : "";
  byId("shown").textContent = count === all ? `All ${all} runs are shown.` : `${count} of ${all} runs are shown${of}.`;
  remember("search", words.value);
  for (const [select, name] of choices) remember(name, select.value);
  remember("runs", chosenRuns ? [...chosenRuns].map((anchor) => anchor.replace(/^run-/, "")).join(",") : "");
  document.dispatchEvent(new CustomEvent("runs-shown"));
}

function addChoice(heading, column) {
  const name = heading.dataset.choose;
  const textOf = (run) => {
    const { text, value } = run.cells[column];
    return "rank" in heading.dataset || value === null ? text : String(value);
  };
  const counts = new Map();
  for (const run of runs) counts.set(textOf(run), (counts.get(textOf(run)) || 0) + 1);
  if (counts.size < 2) return;
  const values = [...counts.keys()];
  if (isNumeric[column] && !("rank" in heading.dataset)) values.sort(collator.compare);
  const select = element("select", { id: `filter-${name.toLowerCase()}` }, new Option("all", ""));
  for (const value of values) select.append(new Option(`${value} (${counts.get(value)})`, value));
  const label = element("label", { htmlFor: select.id }, name);
  filters.insertBefore(element("div", { className: "field" }, label, select), filters.querySelector("button"));
  choices.push([select, name.toLowerCase(), textOf]);
}

function chooseRuns(names) {
  chosenRuns = names ? new Set(names.split(",").map((name) => `run-${name}`)) : null;
}

/** Everything as it was when the page was opened without a selection. */
function clearFilters() {
  words.value = "";
  for (const [select] of choices) select.value = "";
  chooseRuns("");
}

/** What the address selects; what it names and the page lacks is left out. */
function readAddress() {
  words.value = address.get("search") || "";
  for (const [select, name] of choices) {
    const wanted = address.get(name) || "";
    if ([...select.options].some((option) => option.value === wanted)) select.value = wanted;
  }
  chooseRuns(address.get("runs"));
  const sorted = address.get("sort") || "";
  sortBy(headings.findIndex((heading) => heading.dataset.title === sorted.replace(/^-/, "")), sorted.startsWith("-"));
}

headings.forEach((heading, column) => {
  heading.dataset.title = heading.textContent.trim();
  const button = element("button", { type: "button", className: "sort" }, ...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", async () => {
    await ready;
    sortBy(column, heading.getAttribute("aria-sort") === "ascending");
    filter();
  });
});
filters.addEventListener("input", filter);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", (event) => {
  event.preventDefault();
  clearFilters();
  sortBy(-1);
  filter();
});
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-runs], a[data-select]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  await ready;
  clearFilters();
  chooseRuns(link.dataset.runs);
  const [wantedName, wanted] = (link.dataset.select || "").split("=");
  for (const [select, name] of choices) if (name === wantedName) select.value = wanted;
  filter();
  table.scrollIntoView();
});

/** Once the runs are unpacked, and the table shows those that the address selects. */
const ready = unpacked("rows").then((text) => {
  runs = JSON.parse(text).map(unpackedRun);
  order = [...runs];
  headings.forEach((heading, column) => heading.dataset.choose && addChoice(heading, column));
  readAddress();
  filter();
  filters.hidden = false;
});

