"use strict";
// The page of one sweep. Data are inflated from the script blocks beside this one; text from them reaches the document
// through textContent alone. The address after # holds the whole view, so that a link or the back button restores it.

const ROW_HEIGHT = 32; // pixels of a table row, its border included
const OVERSCAN = 12; // rows drawn above and below what is seen
const MOST_PICKED = 24; // curves at once: eight colours by three dashes
const MOST_LISTED = 200; // rows of a plain table before the rest is asked for
const SVG = "http://www.w3.org/2000/svg";
const TABS = { cells: "Cells", curves: "Curves", effects: "Effects", failures: "Failures", provenance: "Provenance", metrics: "Metrics" };
const COLORS = {
  light: ["#0b63b5", "#c44e00", "#007a57", "#a8457f", "#8a6500", "#5b4bb3", "#a3161f", "#5a5d66"],
  dark: ["#62b0f5", "#ff9152", "#42d3a2", "#ee9fcb", "#efc04f", "#b5a6ff", "#ff8f88", "#b9bcc6"],
};
const DASHES = ["solid", "dash", "dot"];
const STROKES = { solid: "", dash: "6 3", dot: "2 2" };

// --- small helpers ---------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);

/** An element with attributes (`text`, `on: {event: function}` besides HTML's own) and children. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function drawing(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

async function inflate(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (sign) => sign.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

async function inflateJson(id) {
  return JSON.parse(new TextDecoder().decode(await inflate(id)));
}

/** Calls `act` once however often it is asked for, and hands out the same promise. */
function once(act) {
  let promise = null;
  return (...given) => (promise ??= act(...given));
}

function compareText(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

function lengthName(length) {
  for (const [unit, size] of [["M", 2 ** 20], ["K", 2 ** 10]]) if (length && length % size === 0) return length / size + unit;
  return String(length);
}

function exact(value) {
  return value === null || value === undefined ? "none" : String(value);
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = false;
}

function say(text) {
  byId("matches").textContent = text;
}

// --- the view and its address ----------------------------------------------------------------------------------------

const START = { tab: "cells", search: "", sort: "", down: false, filters: {}, picked: [], seeds: "mean", x: "tokens", theme: "auto", measure: "", within: "all" };
let view = structuredClone(START);
let data = null;

function addressOf(view) {
  const given = new URLSearchParams();
  for (const name of ["tab", "search", "sort", "seeds", "x", "theme", "measure", "within"]) {
    if (view[name] !== START[name]) given.set(name, view[name]);
  }
  if (view.down) given.set("order", "down");
  for (const [group, levels] of Object.entries(view.filters)) for (const level of levels) given.append(`only.${group}`, level);
  for (const cell of view.picked) given.append("pick", data.cells[cell].id);
  return `#${given}`;
}

function viewOf(address) {
  const given = new URLSearchParams(address.replace(/^#/, ""));
  const found = structuredClone(START);
  for (const name of ["search", "sort", "measure", "within"]) found[name] = given.get(name) ?? START[name];
  const among = { tab: Object.keys(TABS), seeds: Object.keys(data.tables), x: ["tokens", "wall"], theme: ["auto", "light", "dark"] };
  for (const [name, allowed] of Object.entries(among)) if (allowed.includes(given.get(name))) found[name] = given.get(name);
  found.down = given.get("order") === "down";
  for (const [name, level] of given) if (name.startsWith("only.")) (found.filters[name.slice(5)] ??= []).push(level);
  found.picked = [...new Set(given.getAll("pick"))].map((id) => data.placeOf.get(id)).filter((cell) => cell !== undefined).slice(0, MOST_PICKED);
  return found;
}

/** Takes over what changed, writes the address (a new step of the history, unless `quiet`) and draws. */
function change(changes, { quiet = false } = {}) {
  view = { ...view, ...changes };
  const address = addressOf(view);
  if (address !== (location.hash || "#")) history[quiet ? "replaceState" : "pushState"](null, "", address);
  draw();
}

function restore() {
  view = viewOf(location.hash);
  byId("search").value = view.search;
  draw();
}

// --- rows, filters, order --------------------------------------------------------------------------------------------

/** Rows of the chosen table with what filters, search and sorting need of each, made once. */
function prepared(table) {
  const groups = table.words.filter((word) => word !== "Seeds");
  const rows = table.rows.map((row, position) => {
    const cells = row.cells.map((cell) => data.cells[cell]);
    const states = [...new Set(cells.map((cell) => cell.state))];
    const levels = Object.fromEntries(table.words.map((word, index) => [word, [row.words[index]]]));
    const parts = cells.flatMap((cell) => [cell.id, cell.slug, cell.state, cell.cause ?? ""]);
    return { ...row, position, states, levels: { ...levels, State: states }, text: [...parts, ...row.words].join(" ").toLowerCase() };
  });
  return { words: table.words, groups: [...groups, "State"], rows };
}

function passes(row, filters, besides = null) {
  return Object.entries(filters).every(([group, wanted]) => group === besides || !row.levels[group] || wanted.some((level) => row.levels[group].includes(level)));
}

function found(row, terms) {
  return terms.every((term) => row.text.includes(term));
}

function searchTerms() {
  return view.search.toLowerCase().split(/\s+/).filter(Boolean);
}

function matching() {
  const terms = searchTerms();
  return tableNow().rows.filter((row) => found(row, terms) && passes(row, view.filters));
}

function cellCount(rows) {
  return rows.reduce((sum, row) => sum + row.cells.length, 0);
}

/** Numbers by value, words by text, in the grid's order where equal; what has no number stands last either way. */
function sorted(rows) {
  const number = data.columns.findIndex((column) => column.heading === view.sort);
  const word = tableNow().words.indexOf(view.sort);
  if (number < 0 && word < 0 && !["State", "Cell"].includes(view.sort)) return rows;
  const sign = view.down ? -1 : 1;
  if (number >= 0) {
    const value = (row) => row.numbers[number][1];
    const numbered = rows.filter((row) => value(row) !== null).sort((a, b) => sign * (value(a) - value(b)) || a.position - b.position);
    return [...numbered, ...rows.filter((row) => value(row) === null)];
  }
  const text = (row) => (word >= 0 ? row.words[word] : view.sort === "State" ? row.states.join("/") : data.cells[row.cells[0]].slug);
  const numeric = rows.every((row) => text(row) !== "" && Number.isFinite(Number(text(row))));
  const compare = numeric ? (a, b) => Number(text(a)) - Number(text(b)) : (a, b) => compareText(text(a), text(b));
  return [...rows].sort((a, b) => sign * compare(a, b) || a.position - b.position);
}

/** By column: the printed number that is the best of the rows shown; none where all are alike, or alone. */
function bestOf(rows) {
  return data.columns.map((column, index) => {
    if (!column.better) return null;
    const numbers = rows.filter((row) => row.numbers[index][1] !== null).map((row) => parseFloat(row.numbers[index][0]));
    if (new Set(numbers).size < 2) return null;
    return numbers.reduce((best, number) => (column.better > 0 ? Math.max(best, number) : Math.min(best, number)));
  });
}

const tableNow = () => data.prepared[view.seeds] ?? data.prepared.mean;

// --- a table of any length -------------------------------------------------------------------------------------------

/** A table of which only the rows in sight exist. One stop for Tab; arrows, Home, End and Page keys move inside.

Columns are {heading, width (in characters, or as CSS), number, header (row header), sort (its name, if it sorts), cell(row)}; the
first two stay in sight where `fixed` says so. */
class Grid {
  constructor(label, { onSort = null, rowClass = () => "", fixed = false } = {}) {
    this.onSort = onSort;
    this.rowClass = rowClass;
    this.cursor = { row: 0, column: 0 };
    this.rows = [];
    this.table = make("table", { role: "grid", "aria-label": label, class: fixed ? "fixed" : null });
    this.viewport = make("div", { class: "viewport", role: "region", "aria-label": `${label}, scrolls`, tabindex: "-1" }, this.table);
    this.viewport.addEventListener("scroll", () => this.frame(), { passive: true });
    this.table.addEventListener("keydown", (event) => this.move(event));
    this.table.addEventListener("focusin", (event) => this.follow(event.target));
    new ResizeObserver(() => this.frame()).observe(this.viewport);
  }

  show(columns, rows, order) {
    const focused = this.table.contains(document.activeElement) ? document.activeElement.closest("thead th")?.cellIndex : undefined;
    const held = this.body?.contains(document.activeElement);
    this.rows = rows;
    this.columns = columns;
    const width = columns.reduce((sum, column) => sum + (typeof column.width === "number" ? column.width : 6), 0);
    const cols = columns.map((column) => {
      const col = make("col");
      col.style.width = typeof column.width === "number" ? `${column.width}ch` : column.width;
      return col;
    });
    this.table.style.width = `max(100%, ${width}ch)`;
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.table.setAttribute("aria-colcount", columns.length);
    this.body = make("tbody");
    const head = make("tr", { "aria-rowindex": 1 }, ...columns.map((column) => this.heading(column, order)));
    this.table.replaceChildren(make("colgroup", {}, ...cols), make("thead", {}, head), this.body);
    this.cursor = { row: Math.min(this.cursor.row, Math.max(0, rows.length - 1)), column: Math.min(this.cursor.column, columns.length - 1) };
    this.drawn = null;
    this.render();
    if (held) (this.target(this.cursor) ?? this.viewport).focus({ preventScroll: true });
    if (focused !== undefined) head.cells[focused]?.querySelector("button")?.focus();
  }

  heading(column, order) {
    const kind = column.number ? "n" : null;
    if (!column.sort) return make("th", { scope: "col", class: `plain ${kind ?? ""}`, text: column.heading, title: column.title });
    const direction = order?.column !== column.sort ? "none" : order.down ? "descending" : "ascending";
    const button = make("button", { type: "button", text: column.heading, title: column.title, on: { click: () => this.onSort(column.sort) } });
    return make("th", { scope: "col", class: kind, "aria-sort": direction }, button);
  }

  frame() {
    if (this.waiting || !this.body) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.render();
    });
  }

  render() {
    const height = window.innerHeight; // the table is never taller, and its own height follows from what is drawn
    const first = Math.max(0, Math.floor(this.viewport.scrollTop / ROW_HEIGHT) - OVERSCAN);
    const last = Math.min(this.rows.length, first + Math.ceil(height / ROW_HEIGHT) + 2 * OVERSCAN);
    if (this.drawn?.[0] === first && this.drawn?.[1] === last) return;
    const holds = this.body.contains(document.activeElement);
    this.drawn = [first, last];
    const rows = this.rows.slice(first, last).map((row, index) => this.row(row, first + index));
    this.body.replaceChildren(this.gap(first), ...rows, this.gap(this.rows.length - last));
    this.setStop();
    if (holds) (this.target(this.cursor) ?? this.viewport).focus({ preventScroll: true });
  }

  gap(rows) {
    const cell = make("td", { colspan: this.columns.length });
    cell.style.height = `${rows * ROW_HEIGHT}px`;
    return make("tr", { class: "gap", "aria-hidden": "true", hidden: rows === 0 }, cell);
  }

  row(row, index) {
    const line = make("tr", { "aria-rowindex": index + 2, class: this.rowClass(row) });
    for (const column of this.columns) {
      const content = column.cell(row);
      const cell = make(column.header ? "th" : "td", { scope: column.header ? "row" : null, class: column.number ? "n" : null });
      if (content instanceof Node) cell.append(content);
      else {
        cell.textContent = content;
        cell.title = content;
      }
      line.append(cell);
    }
    for (const cell of line.cells) (cell.querySelector("button, input") ?? cell).tabIndex = -1;
    return line;
  }

  target({ row, column }) {
    const cell = this.body.querySelector(`tr[aria-rowindex="${row + 2}"]`)?.cells[column];
    return cell ? (cell.querySelector("button, input") ?? cell) : null;
  }

  setStop() {
    this.stop?.setAttribute("tabindex", "-1");
    const [first] = this.drawn;
    const seen = Math.ceil(this.viewport.scrollTop / ROW_HEIGHT);
    this.stop = this.target(this.cursor) ?? this.target({ row: Math.max(first, Math.min(seen, this.rows.length - 1)), column: this.cursor.column });
    this.stop?.setAttribute("tabindex", "0");
  }

  follow(element) {
    const cell = element.closest("tbody td, tbody th");
    if (!cell) return;
    this.cursor = { row: Number(cell.parentElement.getAttribute("aria-rowindex")) - 2, column: cell.cellIndex };
    this.setStop();
  }

  move(event) {
    if (!event.target.closest("tbody") || event.altKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.viewport.clientHeight / ROW_HEIGHT) - 2);
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-page, 0], PageDown: [page, 0] };
    steps.Home = event.ctrlKey ? [-this.rows.length, -this.columns.length] : [0, -this.columns.length];
    steps.End = event.ctrlKey ? [this.rows.length, this.columns.length] : [0, this.columns.length];
    if (!steps[event.key]) return;
    event.preventDefault();
    const [down, right] = steps[event.key];
    this.cursor = {
      row: Math.max(0, Math.min(this.rows.length - 1, this.cursor.row + down)),
      column: Math.max(0, Math.min(this.columns.length - 1, this.cursor.column + right)),
    };
    this.reveal();
    this.target(this.cursor)?.focus({ preventScroll: true });
    this.target(this.cursor)?.closest("td, th").scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    this.reveal();
  }

  /** Scrolls so that the cursor's row stands below the heading, and draws it. */
  reveal() {
    const top = this.cursor.row * ROW_HEIGHT;
    const height = this.viewport.clientHeight - 2 * ROW_HEIGHT;
    if (top < this.viewport.scrollTop) this.viewport.scrollTop = top;
    else if (top > this.viewport.scrollTop + height) this.viewport.scrollTop = top - height;
    this.render();
  }
}

function widest(heading, texts, most = 40) {
  return Math.min(most, Math.max(heading.length + 3, ...[...new Set(texts.map((text) => text.length))].map((length) => length + 2)));
}

// --- cells -----------------------------------------------------------------------------------------------------------

const cellGrid = new Grid("Cells and their numbers", { onSort: sortBy, rowClass: (row) => (row.cells.every((cell) => view.picked.includes(cell)) ? "chosen" : ""), fixed: true });

function sortBy(name) {
  const same = view.sort === name;
  if (same && view.down) change({ sort: "", down: false });
  else change({ sort: name, down: same });
}

function rowName(row) {
  const { slug } = data.cells[row.cells[0]];
  return row.cells.length > 1 ? `${slug} and ${row.cells.length - 1} more seeds` : slug;
}

function pickBox(row) {
  const box = make("input", { type: "checkbox", "aria-label": `Draw the curves of ${rowName(row)}`, on: { change: () => pick(row.cells, box.checked) } });
  box.checked = row.cells.every((cell) => view.picked.includes(cell));
  return box;
}

function pick(cells, wanted) {
  const others = view.picked.filter((cell) => !cells.includes(cell));
  const picked = wanted ? [...others, ...cells] : others;
  if (picked.length > MOST_PICKED) {
    draw();
    say(`At most ${MOST_PICKED} cells can be drawn at once; take some out first.`);
    return;
  }
  change({ picked });
}

function numberButton(row, index, best) {
  const [text, value] = row.numbers[index];
  const kind = value === null ? "word" : best[index] !== null && parseFloat(text) === best[index] ? "best" : null;
  const states = value === null && row.states.length === 1 ? `state-${row.states[0].replace(" ", "-")}` : "";
  const open = () => showTrace(row, index);
  return make("button", { type: "button", class: [kind, states].filter(Boolean).join(" ") || null, text, title: kind === "best" ? "the best of the rows shown" : null, on: { click: open } });
}

function stateText(row) {
  const text = row.states.join("/");
  return make("span", { class: row.states.length === 1 ? `state-${text.replace(" ", "-")}` : "word", text, title: data.cells[row.cells[0]].cause ?? text });
}

function cellColumns(table, best) {
  const words = table.words.map((heading, index) => ({
    heading,
    sort: heading,
    width: table.widths[index],
    cell: (row) => row.words[index],
  }));
  const numbers = data.columns.map((column, index) => ({
    heading: column.heading,
    title: definitionOf(column),
    sort: column.heading,
    number: true,
    width: table.numberWidths[index],
    cell: (row) => numberButton(row, index, best),
  }));
  const name = (row) => make("button", { type: "button", text: rowName(row), title: rowName(row), on: { click: () => showCell(row.cells[0]) } });
  return [
    { heading: "Pick", width: "3rem", cell: pickBox },
    { heading: "Cell", sort: "Cell", width: table.nameWidth, header: true, cell: name },
    ...words,
    { heading: "State", sort: "State", width: table.stateWidth, cell: stateText },
    ...numbers,
  ];
}

function measureWidths(table) {
  table.widths = table.words.map((word, index) => widest(word, table.rows.map((row) => row.words[index]), 24));
  table.numberWidths = data.columns.map((column, index) => widest(column.heading, table.rows.map((row) => row.numbers[index][0]), 22));
  table.nameWidth = widest("Cell", table.rows.map(rowName), 34);
  table.stateWidth = widest("State", table.rows.map((row) => row.states.join("/")), 18);
}

function drawCells() {
  const rows = sorted(matching());
  const table = tableNow();
  cellGrid.show(cellColumns(table, bestOf(rows)), rows, { column: view.sort, down: view.down });
}

function buildCells() {
  const seeds = data.tables.each
    ? radios("Several seeds as", "seeds", { mean: "mean ± sd", each: "one row a seed" })
    : null;
  const hint = "Press a number for where it comes from, a name for all of the cell; tick cells to draw their curves. Green and bold: the best of the rows shown.";
  byId("panel-cells").replaceChildren(
    make("div", { class: "bar" }, seeds, make("p", { class: "hint", text: hint })),
    cellGrid.viewport,
    make("div", { class: "notes" }, ...data.notes.map((text) => make("p", { text }))),
  );
}

/** A group of radio buttons for one entry of the view. */
function radios(label, name, choices) {
  const inputs = Object.entries(choices).map(([value, text]) => {
    const input = make("input", { type: "radio", name, value, on: { change: () => change({ [name]: value }) } });
    return make("label", {}, input, text);
  });
  return make("fieldset", {}, make("legend", { text: label }), ...inputs);
}

function syncRadios() {
  for (const input of document.querySelectorAll("main input[type=radio]")) input.checked = view[input.name] === input.value;
}

// --- filters ---------------------------------------------------------------------------------------------------------

function buildFilters() {
  const boxes = tableNow().groups.map((group) => {
    const levels = [...new Set(tableNow().rows.flatMap((row) => row.levels[group]))];
    return make("fieldset", { "data-group": group }, make("legend", { text: group }), make("div", { class: "levels" }, ...levels.map((level) => levelBox(group, level))));
  });
  byId("filter-groups").replaceChildren(...boxes);
  byId("filter-groups").dataset.table = view.seeds;
}

function levelBox(group, level) {
  const input = make("input", { type: "checkbox", on: { change: () => filter(group, level, input.checked) } });
  const label = make("label", { class: "level" }, input, make("span", { class: "name", text: level }), make("span", { class: "count" }));
  label.dataset.level = level;
  return label;
}

function filter(group, level, wanted) {
  const others = (view.filters[group] ?? []).filter((other) => other !== level);
  const levels = wanted ? [...others, level] : others;
  const filters = { ...view.filters, [group]: levels };
  if (!levels.length) delete filters[group];
  change({ filters });
}

/** Sets every box, and beside it how many cells the level has among those that the other filters let through. */
function drawFilters() {
  if (byId("filter-groups").dataset.table !== view.seeds) buildFilters();
  const terms = searchTerms();
  const searched = tableNow().rows.filter((row) => found(row, terms));
  for (const fieldset of byId("filter-groups").children) {
    const { group } = fieldset.dataset;
    const counts = new Map();
    for (const row of searched.filter((row) => passes(row, view.filters, group))) {
      if (group === "State") for (const cell of row.cells) counts.set(data.cells[cell].state, (counts.get(data.cells[cell].state) ?? 0) + 1);
      else for (const level of row.levels[group]) counts.set(level, (counts.get(level) ?? 0) + row.cells.length);
    }
    for (const label of fieldset.querySelectorAll(".level")) {
      const count = counts.get(label.dataset.level) ?? 0;
      label.querySelector("input").checked = (view.filters[group] ?? []).includes(label.dataset.level);
      label.querySelector(".count").textContent = count;
      label.classList.toggle("none", count === 0);
    }
  }
}

// --- where a number comes from ---------------------------------------------------------------------------------------

function definitionOf({ probe, metric }) {
  return data.keys.find((key) => key.probe === probe && key.metric === metric)?.definition ?? "";
}

function valueOf(cell, { probe, metric, length }) {
  return data.cells[cell].values.find(([key]) => sameKey(data.keys[key], probe, metric, length)) ?? null;
}

function sameKey(key, probe, metric, length) {
  return key.probe === probe && key.metric === metric && key.length === length;
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("dl", { class: "facts" }, ...known.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", {}, value instanceof Node ? value : String(value))]));
}

function commitText({ commit, dirty }) {
  return commit ? commit + (dirty ? " with changes" : "") : "not recorded";
}

function attemptFacts(id) {
  const attempt = data.attempts[id];
  if (!attempt) return [["Attempt", "none: this cell has no number here"]];
  return [
    ["Attempt", `${id} (number ${attempt.number} of its cell, ${attempt.kind}, ${attempt.state})`],
    ["Commit", commitText(attempt)],
    ["GPU or device", attempt.gpu ?? "not recorded"],
    ["Host", attempt.host],
    ["Started", attempt.started],
    ["Finished", attempt.finished],
    ["Ran other than asked", attempt.deviation ? JSON.stringify(attempt.deviation) : null],
  ];
}

function valueFacts(value) {
  if (!value) return [["Value", "none was recorded"]];
  const [key, number, n, low, high, , reason] = value;
  return [
    ["Value, unrounded", number === null ? "none" : `${exact(number)} ${data.keys[key].unit}`],
    ["Why there is none", reason],
    ["Samples", n ?? "not recorded"],
    ["95% interval", low === null || high === null ? null : `${low} to ${high}`],
  ];
}

function showTrace(row, index) {
  const column = data.columns[index];
  const [text, mean, sd, seeds, , attempts] = row.numbers[index];
  const whole = [["Printed", text], ["Measures", definitionOf(column)]];
  if (row.cells.length > 1) whole.push(["Mean, unrounded", exact(mean)], ["Standard deviation", sd], ["Seeds with the number", `${seeds} of ${row.cells.length}`]);
  const parts = row.cells.flatMap((cell, place) => {
    const { slug, id, state, cause } = data.cells[cell];
    const value = valueOf(cell, column);
    const about = [["Cell", id], ["State", state], ["Cause", cause], ...valueFacts(value), ...attemptFacts(attempts[place])];
    return [make("h3", { text: slug }), facts([...about, ["To see it", make("code", { text: `atma-sweep show ${id}` })]])];
  });
  openSheet(`${column.heading}: ${text}`, [facts(whole), ...parts]);
}

function showCell(cell) {
  const { slug, id, seed, state, cause, axes, values, curve } = data.cells[cell];
  const levels = Object.entries(axes).map(([axis, level]) => `${axis} ${level}`).join(", ");
  const rows = values.map(([key, value, n, low, high, attempt, reason]) => {
    const { probe, metric, length, unit } = data.keys[key];
    const interval = low === null || high === null ? "" : `${low} to ${high}`;
    return [probe, metric, length ? lengthName(length) : "", value === null ? (reason ?? "") : exact(value), unit, n === null ? "" : String(n), interval, String(attempt)];
  });
  const attempts = [...new Set([...values.map((value) => value[5]), ...(curve ? [curve.attempt] : [])])];
  openSheet(slug, [
    facts([["Cell", id], ["Levels", levels], ["Seed", seed], ["State", state], ["Cause", cause]]),
    make("h3", { text: "Measurements" }),
    rows.length ? plainTable(["Probe", "Metric", "Length", "Value", "Unit", "Samples", "95% interval", "Attempt"], rows) : make("p", { text: "None was recorded." }),
    ...attempts.flatMap((attempt) => [make("h3", { text: `Attempt ${attempt}` }), facts(attemptFacts(attempt))]),
  ]);
}

function openSheet(title, content) {
  byId("sheet-title").textContent = title;
  byId("sheet-body").replaceChildren(...content);
  byId("sheet").showModal();
  byId("sheet").scrollTop = 0;
  byId("sheet-close").focus();
}

/** A table in full, for what is short or has long text; past MOST_LISTED rows a button asks for the rest. */
function plainTable(headings, rows) {
  const body = make("tbody");
  const line = (row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell)));
  const table = make("table", { class: "plain-table" }, make("thead", {}, make("tr", {}, ...headings.map((text) => make("th", { scope: "col", text })))), body);
  body.append(...rows.slice(0, MOST_LISTED).map(line));
  const box = make("div", { class: "scroll", role: "region", "aria-label": headings.join(", "), tabindex: "0" }, table);
  if (rows.length <= MOST_LISTED) return box;
  const more = make("button", { type: "button", text: `Show all ${rows.length}`, on: { click: () => (body.append(...rows.slice(MOST_LISTED).map(line)), more.remove()) } });
  return make("div", {}, box, more);
}

// --- curves ----------------------------------------------------------------------------------------------------------

/** The plotting library writes style attributes, which the page's policy refuses; set as properties they are let in. */
function styleAttributesAsProperties() {
  const plain = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function setAttribute(name, value) {
    if (name === "style") this.style.cssText = value;
    else plain.call(this, name, value);
  };
}

const library = once(async () => {
  const source = new TextDecoder().decode(await inflate("library"));
  styleAttributesAsProperties();
  // it adds the style sheet of its maps, which we never draw, unless an element of that id is there
  for (const [, id] of source.matchAll(/getElementById\("([0-9a-f]{64})"\)/g)) document.head.append(make("style", { id }));
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  return window.Plotly;
});

const curves = new Map();

/** The training and the validation series of a cell: {tokens, wall, loss}, from bytes grouped by their place. */
async function curveOf(cell) {
  if (curves.has(cell)) return curves.get(cell);
  const { id, curve } = data.cells[cell];
  const bytes = new Uint8Array(await inflate(`curve-${id}`));
  let from = 0;
  const column = (size, count, Kind) => {
    const ordered = new Uint8Array(size * count);
    for (let place = 0; place < size; place++) for (let item = 0; item < count; item++) ordered[item * size + place] = bytes[from + place * count + item];
    from += size * count;
    return new Kind(ordered.buffer);
  };
  const found = curve.kept.map((count) => {
    const tokens = column(8, count, Float64Array);
    for (let item = 1; item < count; item++) tokens[item] += tokens[item - 1];
    return { tokens, wall: column(4, count, Float32Array), loss: column(4, count, Float32Array) };
  });
  curves.set(cell, found);
  return found;
}

function isDark() {
  return view.theme === "dark" || (view.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
}

/** Colour and dash of the picked cells, the same in every chart. */
function strokeOf(cell) {
  const place = view.picked.indexOf(cell);
  const colors = COLORS[isDark() ? "dark" : "light"];
  return { color: colors[place % colors.length], dash: DASHES[Math.floor(place / colors.length) % DASHES.length] };
}

function swatch(cell) {
  const { color, dash } = strokeOf(cell);
  const picture = drawing("svg", { width: 22, height: 10, "aria-hidden": "true" });
  picture.append(drawing("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: color, "stroke-width": 3, "stroke-dasharray": STROKES[dash] }));
  return picture;
}

/** Text as the plotting library prints it as it stands: it reads a little HTML. */
function literal(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function layout(xTitle, yTitle, height, more = {}) {
  const style = getComputedStyle(byId("matches"));
  const grid = isDark() ? "#363944" : "#e3e5ea";
  const axis = (title) => ({ title: { text: title }, gridcolor: grid, zerolinecolor: grid, linecolor: style.color, automargin: true });
  return {
    height, margin: { l: 56, r: 12, t: 12, b: 44 }, showlegend: false, hovermode: "closest", dragmode: "zoom",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: style.color, family: "system-ui, sans-serif", size: 12 },
    xaxis: { ...axis(xTitle), ...more }, yaxis: axis(yTitle),
  };
}

const CHART = { responsive: true, displaylogo: false, toImageButtonOptions: { format: "svg" }, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

function trainingTraces(cell, [train, val]) {
  const { color, dash } = strokeOf(cell);
  const name = literal(data.cells[cell].slug);
  const x = ({ tokens, wall }) => Array.from(view.x === "wall" ? wall : tokens);
  const y = ({ loss }) => Array.from(loss, (value) => (Number.isNaN(value) ? null : value));
  const traces = [];
  if (train.loss.length) traces.push({ x: x(train), y: y(train), name: `${name}, train`, mode: "lines", opacity: 0.55, line: { color, dash, width: 1 }, hovertemplate: "%{y:.4f} at %{x}<extra>%{fullData.name}</extra>" });
  if (val.loss.length) traces.push({ x: x(val), y: y(val), name: `${name}, validation`, mode: "lines+markers", line: { color, dash, width: 2.4 }, marker: { color, size: 6 }, hovertemplate: "%{y:.4f} at %{x}<extra>%{fullData.name}</extra>" });
  return traces;
}

/** From the least loss to the most after the first twentieth of training, which would flatten all that follows. */
function lossRange(traces) {
  const end = Math.max(...traces.flatMap(({ x }) => x.slice(-1)));
  const seen = traces.flatMap(({ x, y }) => y.filter((value, index) => value !== null && x[index] > end / 20));
  if (seen.length < 2) return null;
  const [low, high] = seen.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  const margin = 0.05 * (high - low) || 0.1;
  return [low - margin, high + margin];
}

function lengthPoints(cell, { probe, metric }) {
  const about = data.cells[cell].values.filter(([key]) => data.keys[key].probe === probe && data.keys[key].metric === metric);
  return about.map(([key, value, n, low, high, , reason]) => ({ length: data.keys[key].length, value, n, low, high, reason })).sort((a, b) => a.length - b.length);
}

function lengthTrace(cell, chart) {
  const { color, dash } = strokeOf(cell);
  const points = lengthPoints(cell, chart).filter((point) => point.value !== null);
  const scale = chart.percent ? 100 : 1;
  const some = points.some((point) => point.low !== null && point.high !== null);
  const error = some
    ? { type: "data", symmetric: false, array: points.map((p) => scale * ((p.high ?? p.value) - p.value)), arrayminus: points.map((p) => scale * (p.value - (p.low ?? p.value))), thickness: 1, width: 3, color }
    : undefined;
  return {
    x: points.map((point) => point.length), y: points.map((point) => scale * point.value), error_y: error, name: literal(data.cells[cell].slug),
    customdata: points.map((point) => lengthName(point.length)), mode: "lines+markers", line: { color, dash, width: 2 }, marker: { color, size: 6 },
    hovertemplate: "%{y:.4g} at %{customdata}<extra>%{fullData.name}</extra>",
  };
}

const LENGTH_CHARTS = [
  { title: "Clean: long documents", probe: "clean", metric: "nats", unit: "nats/token" },
  { title: "Junk: across documents", probe: "junk", metric: "nats", unit: "nats/token" },
  { title: "Needle: digits right", probe: "needle", metric: "digit_accuracy", unit: "%", percent: true },
];

function buildCurves() {
  const boxes = LENGTH_CHARTS.map(({ title, probe }) => make("div", {}, make("h3", { text: title }), make("div", { class: "chart", id: `chart-${probe}`, role: "img" })));
  byId("panel-curves").replaceChildren(
    make("p", { id: "curves-hint", class: "hint", role: "status" }),
    make("div", { id: "curves-all", hidden: true },
      make("h2", { text: "Loss in training" }),
      make("div", { class: "bar" }, radios("Against", "x", { tokens: "tokens", wall: "wall time" }), make("p", { class: "hint", text: "Thin: training loss. Thick with points: validation loss. The first twentieth of training may lie above the picture; double-click to see all." })),
      make("div", { class: "chart", id: "chart-training", role: "img" }),
      make("p", { class: "hint", id: "curves-missing" }),
      make("h2", { text: "Against context length" }),
      make("div", { class: "charts" }, ...boxes),
      make("div", { id: "curves-numbers" })),
  );
}

function missingCurves() {
  const without = view.picked.filter((cell) => !data.cells[cell].curve).map((cell) => data.cells[cell].slug);
  const thinned = view.picked.filter((cell) => data.cells[cell].curve?.kept.some((count, index) => count < data.cells[cell].curve.all[index]));
  const lines = without.length ? [`No training curve was recorded of ${without.join(", ")}.`] : [];
  if (thinned.length) {
    const { kept, points } = data.cells[thinned[0]].curve;
    lines.push(`Thinned, since the sweep is large: ${thinned.length} of the curves; the first shows ${kept[0] + kept[1]} of ${points} points.`);
  }
  return lines.join(" ");
}

function numbersByLength() {
  const rows = view.picked.flatMap((cell) => LENGTH_CHARTS.flatMap((chart) => lengthPoints(cell, chart).map((point) => [
    data.cells[cell].slug, chart.title, lengthName(point.length), point.value === null ? (point.reason ?? "") : exact(point.value), point.n === null ? "" : String(point.n),
  ])));
  return make("details", {}, make("summary", { text: "These numbers as a table, with the reason where there is none" }), plainTable(["Cell", "Measure", "Length", "Value", "Samples"], rows));
}

let drawingNumber = 0;

async function drawCurves() {
  const mine = ++drawingNumber;
  byId("curves-all").hidden = !view.picked.length;
  byId("curves-hint").textContent = view.picked.length ? "Loading the curves." : "No cell is picked: tick some under Cells.";
  if (!view.picked.length) return;
  byId("curves-missing").textContent = missingCurves();
  byId("curves-numbers").replaceChildren(numbersByLength());
  const cells = [...view.picked];
  const [plotly, ...series] = await Promise.all([library(), ...cells.filter((cell) => data.cells[cell].curve).map(curveOf)]);
  if (mine !== drawingNumber) return; // the view went on while this one was loading
  const traces = cells.filter((cell) => data.cells[cell].curve).flatMap((cell, index) => trainingTraces(cell, series[index]));
  const plan = layout(view.x === "wall" ? "training seconds" : "tokens", "loss, nats/token", 420);
  plan.yaxis.range = lossRange(traces) ?? undefined;
  await chart(plotly, "chart-training", traces, plan, `Training and validation loss of ${cells.length} cells`);
  for (const about of LENGTH_CHARTS) await drawLengths(plotly, cells, about);
  byId("curves-hint").textContent = `Curves of ${cells.length} picked cells. Drag to zoom.`;
}

async function drawLengths(plotly, cells, about) {
  const traces = cells.map((cell) => lengthTrace(cell, about)).filter((trace) => trace.x.length);
  const lengths = [...new Set(traces.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  const axis = { type: "log", tickmode: "array", tickvals: lengths, ticktext: lengths.map(lengthName) };
  await chart(plotly, `chart-${about.probe}`, traces, layout("context length, tokens", about.unit, 280, axis), `${about.title}, ${traces.length} cells against context length`);
}

async function chart(plotly, id, traces, layout, label) {
  const box = byId(id);
  box.setAttribute("aria-label", `${label}; the numbers stand in a table below and under each cell's name`);
  await plotly.react(box, traces, layout, CHART);
  box.dataset.traces = traces.length;
}

// --- effects ---------------------------------------------------------------------------------------------------------

const effectGrid = new Grid("Effects of levels");
const effects = once(() => inflateJson("effects"));

/** The mean difference with its interval, on a scale that all rows share; the line in the middle is no difference. */
function intervalPicture(mean, low, high, most) {
  const x = (value) => 100 + (95 * value) / most;
  const picture = drawing("svg", { viewBox: "0 0 200 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(drawing("line", { x1: 100, x2: 100, y1: 0, y2: 24, stroke: "currentColor", "stroke-opacity": 0.35, "vector-effect": "non-scaling-stroke" }));
  if (low !== null && high !== null) picture.append(drawing("line", { x1: x(low), x2: x(high), y1: 12, y2: 12, stroke: "currentColor", "stroke-width": 2, "vector-effect": "non-scaling-stroke" }));
  if (mean !== null) picture.append(drawing("rect", { x: x(mean) - 1.5, y: 6, width: 3, height: 12, fill: "currentColor" }));
  return picture;
}

async function drawEffects() {
  const all = await effects();
  if (view.tab !== "effects") return;
  const measures = [...new Set(all.rows.map((row) => row.words[0]))];
  const measure = measures.includes(view.measure) ? view.measure : measures[0];
  const ofMeasure = all.rows.filter((row) => row.words[0] === measure);
  const subsets = [...new Set(ofMeasure.map((row) => row.words[3]))];
  const rows = ofMeasure.filter((row) => view.within === "every" || row.words[3] === (subsets.includes(view.within) ? view.within : "all"));
  options("effect-measure", measures, measure);
  options("effect-within", [...subsets, ...(subsets.length > 1 ? ["every"] : [])], view.within);
  const [mean, low, high] = ["Mean", "Low", "High"].map((name) => all.numbers.indexOf(name));
  const most = Math.max(1e-300, ...rows.flatMap((row) => [mean, low, high].map((place) => Math.abs(row.numbers[place][1] ?? 0))));
  const words = all.words.map((heading, index) => ({ heading, header: index === 2, width: widest(heading, rows.map((row) => row.words[index]), 34), cell: (row) => row.words[index] })).slice(1);
  const numbers = all.numbers.map((heading, index) => ({ heading, number: true, width: widest(heading, rows.map((row) => row.numbers[index][0])), cell: (row) => effectButton(row, index) }));
  const rank = ({ heading }) => (["Pairs", "Mean", "Low", "High", "p Holm"].indexOf(heading) + 100) % 99; // the rest after these
  numbers.sort((a, b) => rank(a) - rank(b));
  const picture = { heading: "Mean and 95% interval", width: 30, cell: (row) => intervalPicture(row.numbers[mean][1], row.numbers[low][1], row.numbers[high][1], most) };
  effectGrid.show([...words, picture, ...numbers], rows);
  byId("effect-notes").replaceChildren(...all.notes.map((text) => make("p", { text })));
}

function effectButton(row, index) {
  return make("button", { type: "button", text: row.numbers[index][0], on: { click: () => effects().then((all) => showEffect(all, row)) } });
}

/** Every pair behind an effect: cells at the level in the first half, at the reference in the second. */
function showEffect(all, row) {
  const [probe, metric, length] = row.about;
  const half = row.cells.length / 2;
  const pairs = row.cells.slice(0, half).map((cell, index) => [cell, row.cells[half + index]]);
  const shown = (cell) => {
    const value = valueOf(cell, { probe, metric, length });
    return [data.cells[cell].slug, exact(value?.[1]), `${value?.[5] ?? "none"}`];
  };
  const numbers = all.numbers.map((heading, index) => [heading, row.numbers[index][0]]);
  openSheet(`${row.words[0]}: ${row.words[1]}, ${row.words[2]}`, [
    facts([["Within", row.words[3]], ...numbers, ["Measures", definitionOf({ probe, metric })]]),
    make("h3", { text: "The pairs" }),
    plainTable(["Cell", "Value", "Attempt", "Held against", "Value", "Attempt"], pairs.map(([cell, reference]) => [...shown(cell), ...shown(reference)])),
  ]);
}

function options(id, values, chosen) {
  byId(id).replaceChildren(...values.map((value) => make("option", { value, text: value, selected: value === chosen })));
}

function buildEffects() {
  const select = (id, name, text) => make("label", {}, text, make("select", { id, on: { change: (event) => change({ [name]: event.target.value }) } }));
  byId("panel-effects").replaceChildren(
    make("p", { class: "hint", text: "What a level does, by pairs of cells that agree on everything else. The whole sweep counts here, whatever is filtered. Press a number for its pairs." }),
    make("div", { class: "bar" }, select("effect-measure", "measure", "Measure"), select("effect-within", "within", "Within")),
    effectGrid.viewport,
    make("div", { class: "notes", id: "effect-notes" }),
  );
}

// --- failures, provenance, metrics -----------------------------------------------------------------------------------

function buildFailures() {
  const { columns, rows, tracebacks, notes } = data.failures;
  const lines = rows.map((row, index) => [...row, tracebacks[index] ? make("button", { type: "button", text: "Show", "aria-label": `Traceback of ${row[0]}`, on: { click: () => openSheet(row[0], [make("pre", { text: tracebacks[index] })]) } }) : "none"]);
  byId("panel-failures").replaceChildren(...notes.map((text) => make("p", { text })), rows.length ? plainTable([...columns, "Traceback"], lines) : "");
}

const originGrid = new Grid("Where the numbers of each cell come from");

function letter(index) {
  return index < 26 ? String.fromCharCode(65 + index) : letter(Math.floor(index / 26) - 1) + letter(index % 26);
}

function buildProvenance() {
  const { columns, rows } = data.origins;
  byId("panel-provenance").replaceChildren(
    make("h2", { text: "What differs between the cells" }),
    auditList(),
    make("h2", { text: "Code, machine and software" }),
    rows.length ? plainTable(["Origin", ...columns], rows.map((row, index) => [letter(index), ...row])) : make("p", { text: "No cell has a number yet, or none said where it comes from." }),
    make("h2", { text: "Cell by cell" }),
    originGrid.viewport,
    make("h2", { text: "The grid" }),
    facts([["Launched", data.launched], ["Commit", commitText(data)]]),
    make("details", {}, make("summary", { text: "The grid file as it was launched" }), make("pre", { text: data.grid })),
  );
}

function auditList() {
  const lines = data.audit.length ? data.audit : ["Nothing differs between the cells but their axes."];
  return make("ul", {}, ...lines.map((text) => make("li", { text })));
}

/** One row an attempt with numbers, in the order of the cells that are shown. */
function drawProvenance() {
  const cells = [...new Set(sorted(matching()).flatMap((row) => row.cells))];
  const rows = cells.flatMap((cell) => {
    const ids = [...new Set(data.cells[cell].values.map((value) => value[5]))];
    return (ids.length ? ids : [null]).map((id) => ({ cell, id, ...(data.attempts[id] ?? {}) }));
  });
  const text = (read) => (row) => (row.id === null ? "" : (read(row) ?? "not recorded"));
  const columns = [
    ["Cell", (row) => data.cells[row.cell].slug, 36],
    ["Attempt", (row) => (row.id === null ? "no number yet" : String(row.id)), 16],
    ["Origin", text((row) => (row.origin === null ? null : letter(row.origin))), 14],
    ["Commit", text((row) => row.commit && row.commit.slice(0, 12) + (row.dirty ? " with changes" : "")), 28],
    ["GPU or device", text((row) => row.gpu), 28],
    ["Host", text((row) => row.host), 18],
    ["Finished", text((row) => row.finished), 26],
  ].map(([heading, cell, width], index) => ({ heading, cell, width: Math.min(width, widest(heading, rows.map(cell))), header: index === 0 }));
  originGrid.show(columns, rows);
}

function buildMetrics() {
  const seen = new Map();
  for (const { probe, metric, unit, definition, length } of data.keys) {
    const name = `${probe}.${metric}`;
    if (!seen.has(name)) seen.set(name, { unit, definition, lengths: [] });
    if (length) seen.get(name).lengths.push(lengthName(length));
  }
  const headings = (name) => data.columns.filter((column) => `${column.probe}.${column.metric}` === name).map((column) => column.heading);
  const parts = [...seen].flatMap(([name, { unit, definition, lengths }]) => {
    const told = [definition, unit && `Unit: ${unit}.`, lengths.length && `At context lengths ${lengths.join(", ")}.`, headings(name).length && `Shown as ${headings(name).join(", ")}.`];
    return [make("dt", { text: name }), make("dd", { text: told.filter(Boolean).join(" ") })];
  });
  byId("panel-metrics").replaceChildren(
    make("p", { text: "Losses are nats per token, accuracies and utilisation fractions, printed in %. The curves hold losses and times to seven digits; every other number is exact." }),
    make("dl", {}, ...parts),
  );
}

// --- the page around it ----------------------------------------------------------------------------------------------

function buildTabs() {
  const tabs = Object.entries(TABS).map(([name, text]) => make("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, text, on: { click: () => change({ tab: name }) } }));
  byId("tabs").replaceChildren(...tabs);
  byId("tabs").addEventListener("keydown", moveTab);
}

function moveTab(event) {
  const names = Object.keys(TABS);
  const place = names.indexOf(view.tab);
  const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: names.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  change({ tab: names[(to + names.length) % names.length] });
  byId(`tab-${view.tab}`).focus();
}

function drawTabs() {
  for (const name of Object.keys(TABS)) {
    const chosen = name === view.tab;
    byId(`tab-${name}`).setAttribute("aria-selected", chosen);
    byId(`tab-${name}`).tabIndex = chosen ? 0 : -1;
    byId(`panel-${name}`).hidden = !chosen;
  }
  byId("tab-curves").textContent = view.picked.length ? `Curves (${view.picked.length})` : "Curves";
}

function drawPicked() {
  const chips = view.picked.map((cell) => {
    const { slug } = data.cells[cell];
    const remove = make("button", { type: "button", text: "×", "aria-label": `Take out ${slug}`, on: { click: () => pick([cell], false) } });
    return make("span", { class: "chip" }, swatch(cell), make("span", { text: slug, title: slug }), remove);
  });
  const clear = make("button", { type: "button", text: "Clear", on: { click: () => change({ picked: [] }) } });
  const look = view.tab === "curves" ? null : make("button", { type: "button", text: "Show their curves", on: { click: () => change({ tab: "curves" }) } });
  byId("picked").replaceChildren(make("strong", { text: `${view.picked.length} picked` }), ...chips, ...(look ? [look] : []), clear);
  byId("picked").hidden = !view.picked.length;
}

const DRAW = { cells: drawCells, curves: drawCurves, effects: drawEffects, provenance: drawProvenance };

function draw() {
  if (!data.tables[view.seeds]) view.seeds = "mean";
  document.documentElement.dataset.theme = view.theme;
  byId("theme").value = view.theme;
  drawTabs();
  drawPicked();
  drawFilters();
  syncRadios();
  say(`${cellCount(matching())} of ${data.cells.length} cells match`);
  Promise.resolve(DRAW[view.tab]?.()).catch((error) => trouble(`This part cannot be shown: ${error.message}`));
}

function buildHead() {
  const counts = new Map();
  for (const { state } of data.cells) counts.set(state, (counts.get(state) ?? 0) + 1);
  const told = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
  byId("summary").textContent = `${data.cells.length} cells: ${told}. Launched ${data.launched}.`;
  byId("audit-lines").replaceChildren(...auditList().children);
  byId("audit").hidden = false;
  byId("footer").textContent = `Written by atma-sweep ${data.version}. The file holds everything it shows and asks nothing of the network.`;
}

function listen() {
  let typing = -Infinity;
  byId("search").addEventListener("input", (event) => {
    // one step back undoes a whole word typed without a pause
    change({ search: event.target.value }, { quiet: performance.now() - typing < 1500 });
    typing = performance.now();
  });
  byId("theme").addEventListener("change", (event) => change({ theme: event.target.value }));
  byId("reset").addEventListener("click", () => {
    byId("search").value = "";
    change({ ...structuredClone(START), tab: view.tab, theme: view.theme });
  });
  byId("copy").addEventListener("click", () => navigator.clipboard.writeText(location.href).then(() => say("The link is copied."), () => say("Copy the link from the address bar.")));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the view
    byId("main").focus();
  });
  byId("sheet-close").addEventListener("click", () => byId("sheet").close());
  byId("sheet").addEventListener("click", (event) => event.target === byId("sheet") && byId("sheet").close());
  addEventListener("popstate", restore);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

async function start() {
  data = await inflateJson("core");
  data.placeOf = new Map(data.cells.map((cell, index) => [cell.id, index]));
  data.prepared = Object.fromEntries(Object.entries(data.tables).map(([name, table]) => [name, prepared(table)]));
  Object.values(data.prepared).forEach(measureWidths);
  byId("filters").open = !matchMedia("(max-width: 900px)").matches;
  for (const build of [buildHead, buildTabs, buildCells, buildCurves, buildEffects, buildFailures, buildProvenance, buildMetrics, listen]) build();
  restore();
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}

start().catch((error) => trouble(`This page could not be read: it needs a browser of 2024 or later (${error.message}).`));
