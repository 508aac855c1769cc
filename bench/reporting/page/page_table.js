"use strict";
// The table of all runs: sorting by a heading, filtering by words and choices. Cells carry the value that they are
// sorted by in data-v where it is not their text.

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

const table = byId("runs-table");
const body = table.tBodies[0];
const headings = [...table.tHead.rows[0].cells];
const original = [...body.rows];
let order = [...original];
const searched = new Map(original.map((row) => [row, row.textContent.toLowerCase()]));
const collator = new Intl.Collator("en", { numeric: true });

/** What a cell is sorted and filtered by: a number, a word, or null where the run has no value. */
function valueOf(row, column) {
  const cell = row.cells[column];
  if (cell.dataset.v !== undefined) {
    return headings[column].classList.contains("number") || headings[column].dataset.rank ? Number(cell.dataset.v) : cell.dataset.v;
  }
  const text = cell.textContent.trim();
  if (text === "–" || text === "") return null;
  return headings[column].classList.contains("number") ? Number(text.replaceAll(",", "")) : text;
}

function compare(one, two) {
  return typeof one === "number" && typeof two === "number" ? one - two : collator.compare(String(one), String(two));
}

/** Sort by a column: runs without a value come last either way, equal ones stay as they were. */
function sortBy(column, descending) {
  const keyed = order.map((row) => [valueOf(row, column), row]);
  keyed.sort(([one], [two]) => {
    if (one === null || two === null) return (one === null) - (two === null);
    return descending ? compare(two, one) : compare(one, two);
  });
  order = keyed.map(([, row]) => row);
  arrange();
  headings.forEach((heading, index) => {
    if (index === column) heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else heading.removeAttribute("aria-sort");
  });
}

function arrange() {
  const fragment = document.createDocumentFragment();
  fragment.append(...order);
  body.append(fragment);
}

headings.forEach((heading, column) => {
  const button = element("button", { type: "button", className: "sort" }, ...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => sortBy(column, heading.getAttribute("aria-sort") === "ascending"));
});

// ---- filters

const filters = byId("filters");
const words = byId("filter-text");
const choices = [];

headings.forEach((heading, column) => {
  const name = heading.dataset.choose;
  if (!name) return;
  const textOf = (row) => row.cells[column].dataset.v !== undefined && !heading.dataset.rank ? row.cells[column].dataset.v : row.cells[column].textContent.trim();
  const counts = new Map();
  for (const row of original) counts.set(textOf(row), (counts.get(textOf(row)) || 0) + 1);
  if (counts.size < 2) return;
  const select = element("select", { id: `filter-${name.toLowerCase()}` }, new Option("all", ""));
  for (const [value, count] of counts) select.append(new Option(`${value} (${count})`, value));
  const label = element("label", { htmlFor: select.id }, name);
  filters.insertBefore(element("div", { className: "field" }, label, select), filters.querySelector("button"));
  choices.push([select, textOf]);
});

/** Anchors of the runs that the table shows, in its order. */
function shownRuns() {
  return order.filter((row) => !row.hidden).map((row) => row.id);
}

function filter() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const row of original) {
    const text = searched.get(row);
    const fits = wanted.every((word) => text.includes(word)) && choices.every(([select, textOf]) => !select.value || textOf(row) === select.value);
    row.hidden = !fits;
    count += fits;
  }
  const all = original.length;
  byId("shown").textContent = count === all ? `All ${all} runs are shown.` : `${count} of ${all} runs are shown.`;
  document.dispatchEvent(new CustomEvent("runs-shown"));
}

filters.addEventListener("input", filter);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => {
  order = [...original];
  arrange();
  headings.forEach((heading) => heading.removeAttribute("aria-sort"));
  setTimeout(filter); // once the fields are empty
});
filters.hidden = false;
filter();
