// The page of one sweep. Data are inflated from the script blocks of the page; text from them reaches the document through
// textContent alone. The address after # holds the whole view, so that a link or the back button restores it.
// This first part: small helpers, the view and its address, and which rows it shows, in which order.

const MAX_PICKED = 24; // curves at once: eight colours by three dashes
const MAX_LISTED = 200; // rows of a plain table before a button shows the rest
const SHAPES = ["svg", "line", "path", "rect", "circle"]; // elements of SVG that the page makes
const TABS = {
  answer: "Results", cells: "Cells", curves: "Curves", effects: "Effects", beside: "Compare", figures: "Figures",
  failures: "Failures", provenance: "Provenance", metrics: "Metrics",
}; // prettier-ignore

/** The tabs of this page: without another sweep there is nothing to compare. */
const currentTabs = () => Object.keys(TABS).filter((name) => name !== "beside" || data.answer.beside);

// --- small helpers ---

const byId = (id) => document.getElementById(id);

/** An element with attributes (`text`, `on: {event: function}` besides HTML's own) and children. */
function make(tag, attributes = {}, ...children) {
  const names = `http://www.w3.org/${SHAPES.includes(tag) ? "2000/svg" : "1999/xhtml"}`;
  const element = document.createElementNS(names, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const paragraphs = (texts) => texts.map((text) => make("p", { text }));
const bulleted = (lines) => make("ul", {}, ...lines.map((text) => make("li", { text })));
const hint = (text) => make("p", { class: "hint", text });
const capitalized = (text) => text[0].toUpperCase() + text.slice(1);
const pressable = (text, act, more = {}) => make("button", { type: "button", text, on: { click: act }, ...more });

/** The bytes of a block of the page. A page that is served sets `blocks.read` to a function that fetches it instead. */
const blocks = {
  read: async (id) => {
    const bytes = Uint8Array.from(atob(byId(id).textContent), (sign) => sign.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  },
};

const inflateJson = async (id) => new Response(await blocks.read(id)).json();

/** Calls `act` at the first call alone and returns the same promise from then on, until `forget` is called. */
function once(act) {
  let promise = null;
  return Object.assign(() => (promise ??= act()), { forget: () => (promise = null) });
}

/** A copy of the entries with this one set, or taken out if it is null. */
const withEntry = (entries, name, value) =>
  Object.fromEntries(Object.entries({ ...entries, [name]: value }).filter(([, one]) => one !== null));

const isNumber = (value) => value !== null && value !== undefined && !Number.isNaN(value);
const column = (rows, index) => rows.map((row) => row[index]);
const average = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function lengthName(length) {
  const unit = [["M", 2 ** 20], ["K", 2 ** 10]].find(([, size]) => length && length % size === 0);
  return unit ? length / unit[1] + unit[0] : String(length);
}

/** A number in seven digits, which is more than any probe resolves; `--json` gives all of them. */
const digits = (value, scale = 1) => (typeof value === "number" ? String(Number((scale * value).toPrecision(7))) : String(value ?? "none"));

const signed = (value, decimals) =>
  `${value > 0 ? "+" : ""}${value.toFixed(decimals)}`.replace("-", "\u2212").replace(/^[+\u2212]([0.]+)$/, "$1");

const trouble = (text) => Object.assign(byId("trouble"), { textContent: text, hidden: false });

/** A word on what was just done, read aloud by screen readers. */
const say = (text) => (byId("said").textContent = text);

// --- the view and its address ---

const START = {
  tab: "answer", search: "", sort: "", down: false, filters: {}, ranges: {}, picked: [], seeds: "mean", x: "tokens",
  theme: "auto", measure: "", axis: "", within: "all", number: "", verdict: "", color: "", smooth: "0", log: "",
}; // prettier-ignore
const TEXTS = Object.keys(START).filter((name) => typeof START[name] === "string");
let view = structuredClone(START);
let data = null;

function addressOf(view) {
  const address = new URLSearchParams();
  for (const name of TEXTS) if (view[name] !== START[name]) address.set(name, view[name]);
  if (view.down) address.set("order", "down");
  for (const [group, levels] of Object.entries(view.filters))
    for (const level of levels) address.append(`only.${group}`, level);
  for (const [heading, ends] of Object.entries(view.ranges)) address.set(`range.${heading}`, ends.join("~"));
  for (const cell of view.picked) address.append("pick", data.cells[cell].id);
  return `#${address}`;
}

function viewOf(address) {
  const options = new URLSearchParams(address.replace(/^#/, ""));
  const restored = structuredClone(START);
  for (const name of TEXTS) restored[name] = options.get(name) ?? START[name];
  const choices = { tab: currentTabs(), seeds: Object.keys(data.tables), x: ["tokens", "wall"], theme: ["auto", "light", "dark"] };
  for (const [name, allowed] of Object.entries(choices)) if (!allowed.includes(restored[name])) restored[name] = START[name];
  restored.down = options.get("order") === "down";
  for (const [name, text] of options) {
    if (name.startsWith("only.")) (restored.filters[name.slice(5)] ??= []).push(text);
    const ends = text.split("~").map(Number);
    if (name.startsWith("range.") && ends.length === 2 && ends.every(Number.isFinite)) restored.ranges[name.slice(6)] = ends;
  }
  const cells = options.getAll("pick").map((id) => data.indexOf.get(id));
  restored.picked = [...new Set(cells.filter((cell) => cell !== undefined))].slice(0, MAX_PICKED);
  return restored;
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
  draw();
}

// --- rows, filters, order ---

/** Rows of the chosen table with what filters, search and sorting need of each, prepared once. */
function prepared(table) {
  // ranges filter what is a scale, boxes the levels of everything else
  const groups = table.words.filter((word) => word !== "Seeds" && !table.scales.includes(word));
  const rows = table.rows.map((row, position) => {
    const cells = row.cells.map((cell) => data.cells[cell]);
    const states = [...new Set(cells.map((cell) => cell.state))];
    const levels = Object.fromEntries(table.words.map((word, index) => [word, [row.words[index]]]));
    const parts = cells.flatMap((cell) => [cell.id, cell.slug, cell.state, cell.cause ?? ""]);
    const text = [...parts, ...row.words, ...row.words.map((level, index) => levelName(table.words[index], level))];
    return { ...row, position, states, levels: { ...levels, State: states }, text: text.join(" ").toLowerCase() };
  });
  return { ...table, groups: [...groups, "State"], rows };
}

/** The heading of a column of levels, and a level below it, in plain words. */
const headingName = (heading) => data.answer.overview.headings[heading]?.words ?? heading;
const levelName = (heading, level) => data.answer.overview.headings[heading]?.levels[level] ?? level;

/** A number of a row in printed units, by the heading of its column; null without one. */
function printedNumber(row, heading) {
  if (row.levels[heading]) return Number(row.levels[heading][0]);
  const index = data.columns.findIndex((column) => column.heading === heading);
  const value = row.numbers[index]?.[1] ?? null;
  return value !== null && data.columns[index].percent ? 100 * value : value;
}

const searchTerms = () => view.search.toLowerCase().split(/\s+/).filter(Boolean);
const isFiltering = () => [view.filters, view.ranges].some((one) => Object.keys(one).length) || searchTerms().length > 0;

/** The rows with every word of the search, a level of every filter (but for the group `except`) and every number in its range. */
function matching(except = null) {
  const terms = searchTerms();
  const filters = Object.entries(view.filters).filter(([group]) => group !== except);
  const ranges = Object.entries(view.ranges).map(([heading, ends]) => [heading, ...ends]);
  const within = (value, low, high) => value !== null && value >= low && value <= high;
  return currentTable().rows.filter((row) => terms.every((term) => row.text.includes(term)) &&
      filters.every(([group, levels]) => !row.levels[group] || levels.some((level) => row.levels[group].includes(level))) &&
      ranges.every(([heading, low, high]) => within(printedNumber(row, heading), low, high))); // prettier-ignore
}

/** The cells that search, filters and ranges leave: every panel of the page shows these. */
function matchingCells() {
  const states = view.filters.State;
  return new Set(matching().flatMap((row) => row.cells).filter((cell) => !states || states.includes(data.cells[cell].state)));
}

/** What panels redraw for: it differs if and only if other cells match. */
const filterKey = () => (isFiltering() ? JSON.stringify([view.search, view.filters, view.ranges, view.seeds]) : "");

/** The column that the table is sorted by before the reader chooses one: that of the main measure, best first. */
function sorting() {
  if (view.sort) return { column: view.sort, down: view.down };
  const main = data.answer.best.measures[0];
  const column = data.columns.find(({ heading, better }) => heading === main?.heading && better);
  return column ? { column: column.heading, down: column.better > 0 } : { column: "", down: false };
}

/** Numbers by value, words by text, in the grid's order where equal; rows without a number come last either way. */
function sorted(rows) {
  const { column, down } = sorting();
  const number = data.columns.findIndex(({ heading }) => heading === column);
  const word = currentTable().words.indexOf(column);
  if (number < 0 && word < 0 && !["State", "Cell"].includes(column)) return rows;
  const text = (row) => (word >= 0 ? row.words[word] : column === "State" ? row.states.join("/") : data.cells[row.cells[0]].slug);
  const numeric = number < 0 && rows.every((row) => text(row) !== "" && Number.isFinite(Number(text(row))));
  const key = number >= 0 ? (row) => row.numbers[number][1] : numeric ? (row) => Number(text(row)) : text;
  const order = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : (down ? -1 : 1) * (a < b ? -1 : 1));
  return [...rows].sort((a, b) => order(key(a), key(b)) || a.position - b.position);
}

/** By column: the printed number that is the best of the rows shown; none where all are alike, or alone. */
function bestOf(rows) {
  return data.columns.map((column, index) => {
    if (!column.better) return null;
    const numbers = rows.filter((row) => row.numbers[index][1] !== null).map((row) => parseFloat(row.numbers[index][0]));
    if (new Set(numbers).size < 2) return null;
    const best = (column.better > 0 ? Math.max : Math.min)(...numbers);
    // what half of the rows reach distinguishes none of them
    return numbers.filter((number) => number === best).length > numbers.length / 2 ? null : best;
  });
}

const currentTable = () => data.prepared[view.seeds] ?? data.prepared.mean;
