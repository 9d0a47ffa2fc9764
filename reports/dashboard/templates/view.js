// The page of one sweep. Data are inflated from the script blocks beside this one; text from them reaches the document
// through textContent alone. The address after # holds the whole view, so that a link or the back button restores it.
// This first part: small helpers, the view and its address, and which rows it shows, in which order.

const MOST_PICKED = 24; // curves at once: eight colours by three dashes
const MOST_LISTED = 200; // rows of a plain table before the rest is asked for
const SVG = "http://www.w3.org/2000/svg";
const TABS = {
  answer: "Results",
  cells: "Cells",
  curves: "Curves",
  effects: "Effects",
  beside: "Compare",
  failures: "Failures",
  provenance: "Provenance",
  metrics: "Metrics",
};

/** The tabs of this page: one that has no sweep beside its own has none for it. */
const tabsNow = () => Object.keys(TABS).filter((name) => name !== "beside" || data.answer.beside);

// --- small helpers ---

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

/** The bytes of a block of the page. A page that is served sets `blocks.read` to a function that fetches it instead. */
const blocks = {
  read: async (id) => {
    const bytes = Uint8Array.from(atob(byId(id).textContent), (sign) => sign.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  },
};

const inflate = (id) => blocks.read(id);

async function inflateJson(id) {
  return JSON.parse(new TextDecoder().decode(await inflate(id)));
}

/** Calls `act` once however often it is asked for, and hands out the same promise, until `forget` is called. */
function once(act) {
  let promise = null;
  const asked = (...given) => (promise ??= act(...given));
  asked.forget = () => (promise = null);
  return asked;
}

function compareText(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

function lengthName(length) {
  for (const [unit, size] of [
    ["M", 2 ** 20],
    ["K", 2 ** 10],
  ])
    if (length && length % size === 0) return length / size + unit;
  return String(length);
}

/** A number in seven digits, which is more than any probe resolves; `--json` gives all of them. */
function digits(value) {
  if (value === null || value === undefined) return "none";
  return typeof value === "number" ? String(Number(value.toPrecision(7))) : String(value);
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = false;
}

/** Tells how many cells match, beside the filters. */
function tellMatches(text) {
  byId("matches").textContent = text;
}

/** A word on what was just done, read aloud by screen readers. */
function say(text) {
  byId("said").textContent = text;
}

// --- the view and its address ---

const START = {
  tab: "answer",
  search: "",
  sort: "",
  down: false,
  filters: {},
  picked: [],
  seeds: "mean",
  x: "tokens",
  theme: "auto",
  measure: "",
  axis: "",
  within: "all",
  number: "",
  verdict: "",
  color: "",
};
let view = structuredClone(START);
let data = null;

function addressOf(view) {
  const given = new URLSearchParams();
  for (const name of [
    "tab",
    "search",
    "sort",
    "seeds",
    "x",
    "theme",
    "measure",
    "axis",
    "within",
    "number",
    "verdict",
  ]) {
    if (view[name] !== START[name]) given.set(name, view[name]);
  }
  if (view.down) given.set("order", "down");
  for (const [group, levels] of Object.entries(view.filters))
    for (const level of levels) given.append(`only.${group}`, level);
  for (const cell of view.picked) given.append("pick", data.cells[cell].id);
  return `#${given}`;
}

function viewOf(address) {
  const given = new URLSearchParams(address.replace(/^#/, ""));
  const found = structuredClone(START);
  for (const name of ["search", "sort", "measure", "axis", "within", "number", "verdict", "color"])
    found[name] = given.get(name) ?? START[name];
  const among = {
    tab: tabsNow(),
    seeds: Object.keys(data.tables),
    x: ["tokens", "wall"],
    theme: ["auto", "light", "dark"],
  };
  for (const [name, allowed] of Object.entries(among))
    if (allowed.includes(given.get(name))) found[name] = given.get(name);
  found.down = given.get("order") === "down";
  for (const [name, level] of given) if (name.startsWith("only.")) (found.filters[name.slice(5)] ??= []).push(level);
  found.picked = [...new Set(given.getAll("pick"))]
    .map((id) => data.placeOf.get(id))
    .filter((cell) => cell !== undefined)
    .slice(0, MOST_PICKED);
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

// --- rows, filters, order ---

/** Rows of the chosen table with what filters, search and sorting need of each, made once. */
function prepared(table) {
  const groups = table.words.filter((word) => word !== "Seeds");
  const rows = table.rows.map((row, position) => {
    const cells = row.cells.map((cell) => data.cells[cell]);
    const states = [...new Set(cells.map((cell) => cell.state))];
    const levels = Object.fromEntries(table.words.map((word, index) => [word, [row.words[index]]]));
    const parts = cells.flatMap((cell) => [cell.id, cell.slug, cell.state, cell.cause ?? ""]);
    return {
      ...row,
      position,
      states,
      levels: { ...levels, State: states },
      text: [...parts, ...row.words].join(" ").toLowerCase(),
    };
  });
  return { words: table.words, groups: [...groups, "State"], rows };
}

function passes(row, filters, besides = null) {
  return Object.entries(filters).every(
    ([group, wanted]) =>
      group === besides || !row.levels[group] || wanted.some((level) => row.levels[group].includes(level)),
  );
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
    const numbered = rows
      .filter((row) => value(row) !== null)
      .sort((a, b) => sign * (value(a) - value(b)) || a.position - b.position);
    return [...numbered, ...rows.filter((row) => value(row) === null)];
  }
  const text = (row) =>
    word >= 0 ? row.words[word] : view.sort === "State" ? row.states.join("/") : data.cells[row.cells[0]].slug;
  const numeric = rows.every((row) => text(row) !== "" && Number.isFinite(Number(text(row))));
  const compare = numeric ? (a, b) => Number(text(a)) - Number(text(b)) : (a, b) => compareText(text(a), text(b));
  return [...rows].sort((a, b) => sign * compare(a, b) || a.position - b.position);
}

/** By column: the printed number that is the best of the rows shown; none where all are alike, or alone. */
function bestOf(rows) {
  return data.columns.map((column, index) => {
    if (!column.better) return null;
    const numbers = rows
      .filter((row) => row.numbers[index][1] !== null)
      .map((row) => parseFloat(row.numbers[index][0]));
    if (new Set(numbers).size < 2) return null;
    const best = numbers.reduce((one, other) => (column.better > 0 ? Math.max(one, other) : Math.min(one, other)));
    // what half of the rows reach distinguishes none of them
    return numbers.filter((number) => number === best).length > numbers.length / 2 ? null : best;
  });
}

const tableNow = () => data.prepared[view.seeds] ?? data.prepared.mean;
