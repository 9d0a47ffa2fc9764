// The other tabs and the page around them; the last of the scripts, which starts it all.

// --- effects ---

const FIRST = ["Pairs", "Mean", "Low", "High", "p Holm"]; // numbers of an effect that stand before the others
const effectGrid = new Grid("Effects of levels");
const effects = once(() => inflateJson("effects"));

/** The mean difference with its interval, on a scale that all rows share; the line in the middle is no difference. */
function intervalPicture(mean, low, high, most) {
  const x = (value) => 100 + (95 * value) / most;
  const picture = drawing("svg", { viewBox: "0 0 200 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(
    drawing("line", {
      x1: 100,
      x2: 100,
      y1: 0,
      y2: 24,
      stroke: "currentColor",
      "stroke-opacity": 0.35,
      "vector-effect": "non-scaling-stroke",
    }),
  );
  if (low !== null && high !== null)
    picture.append(
      drawing("line", {
        x1: x(low),
        x2: x(high),
        y1: 12,
        y2: 12,
        stroke: "currentColor",
        "stroke-width": 2,
        "vector-effect": "non-scaling-stroke",
      }),
    );
  if (mean !== null)
    picture.append(drawing("rect", { x: x(mean) - 1.5, y: 6, width: 3, height: 12, fill: "currentColor" }));
  return picture;
}

async function drawEffects() {
  const all = await effects();
  if (view.tab !== "effects") return;
  const measures = [...new Set(all.rows.map((row) => row.words[0]))];
  const measure = measures.includes(view.measure) ? view.measure : measures[0];
  const ofMeasure = all.rows.filter((row) => row.words[0] === measure);
  const subsets = [...new Set(ofMeasure.map((row) => row.words[3]))];
  const rows = ofMeasure.filter(
    (row) => view.within === "every" || row.words[3] === (subsets.includes(view.within) ? view.within : "all"),
  );
  options("effect-measure", measures, measure);
  options("effect-within", [...subsets, ...(subsets.length > 1 ? ["every"] : [])], view.within);
  const [mean, low, high] = ["Mean", "Low", "High"].map((name) => all.numbers.indexOf(name));
  const most = Math.max(
    1e-300,
    ...rows.flatMap((row) => [mean, low, high].map((place) => Math.abs(row.numbers[place][1] ?? 0))),
  );
  const words = all.words
    .map((heading, index) => ({
      heading,
      header: index === 2,
      width: widest(
        heading,
        rows.map((row) => row.words[index]),
        34,
      ),
      cell: (row) => row.words[index],
    }))
    .slice(1);
  const numbers = all.numbers.map((heading, index) => ({
    heading,
    number: true,
    width: widest(
      heading,
      rows.map((row) => row.numbers[index][0]),
    ),
    cell: (row) => effectButton(row, index),
  }));
  const rank = ({ heading }) => (FIRST.includes(heading) ? FIRST.indexOf(heading) : FIRST.length);
  numbers.sort((a, b) => rank(a) - rank(b));
  const picture = {
    heading: "Mean and 95% interval",
    width: 14,
    cell: (row) => intervalPicture(row.numbers[mean][1], row.numbers[low][1], row.numbers[high][1], most),
  };
  effectGrid.show([...words, picture, ...numbers], rows);
  byId("effect-notes").replaceChildren(...all.notes.map((text) => make("p", { text })));
}

function effectButton(row, index) {
  return make("button", {
    type: "button",
    text: row.numbers[index][0],
    on: { click: () => effects().then((all) => showEffect(all, row)) },
  });
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
    plainTable(
      ["Cell", "Value", "Attempt", "Held against", "Value", "Attempt"],
      pairs.map(([cell, reference]) => [...shown(cell), ...shown(reference)]),
    ),
  ]);
}

function options(id, values, chosen) {
  byId(id).replaceChildren(
    ...values.map((value) => make("option", { value, text: value, selected: value === chosen })),
  );
}

function buildEffects() {
  const select = (id, name, text) =>
    make("label", {}, text, make("select", { id, on: { change: (event) => change({ [name]: event.target.value }) } }));
  byId("panel-effects").replaceChildren(
    make("p", {
      class: "hint",
      text: "What a level does, by pairs of cells that agree on everything else. The whole sweep counts here, whatever is filtered. Press a number for its pairs.",
    }),
    make(
      "div",
      { class: "bar" },
      select("effect-measure", "measure", "Measure"),
      select("effect-within", "within", "Within"),
    ),
    effectGrid.viewport,
    make("div", { class: "notes", id: "effect-notes" }),
  );
}

// --- failures, provenance, metrics ---

function buildFailures() {
  const { columns, rows, tracebacks, notes } = data.failures;
  const lines = rows.map((row, index) => [
    ...row,
    tracebacks[index]
      ? make("button", {
          type: "button",
          text: "Show",
          "aria-label": `Traceback of ${row[0]}`,
          on: { click: () => openSheet(row[0], [make("pre", { text: tracebacks[index] })]) },
        })
      : "none",
  ]);
  byId("panel-failures").replaceChildren(
    ...notes.map((text) => make("p", { text })),
    rows.length ? plainTable([...columns, "Traceback"], lines) : "",
  );
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
    rows.length
      ? plainTable(
          ["Origin", ...columns],
          rows.map((row, index) => [letter(index), ...row]),
        )
      : make("p", { text: "No cell has a number yet, or none said where it comes from." }),
    make("h2", { text: "Cell by cell" }),
    originGrid.viewport,
    make("h2", { text: "The grid" }),
    facts([
      ["Launched", data.launched],
      ["Commit", commitText(data)],
    ]),
    make(
      "details",
      {},
      make("summary", { text: "The grid file as it was launched" }),
      make("pre", { text: data.grid }),
    ),
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
  ].map(([heading, cell, width], index) => ({
    heading,
    cell,
    width: Math.min(width, widest(heading, rows.map(cell))),
    header: index === 0,
  }));
  originGrid.show(columns, rows);
}

function buildMetrics() {
  const seen = new Map();
  for (const { probe, metric, unit, definition, length } of data.keys) {
    const name = `${probe}.${metric}`;
    if (!seen.has(name)) seen.set(name, { unit, definition, lengths: [] });
    if (length) seen.get(name).lengths.push(lengthName(length));
  }
  const headings = (name) =>
    data.columns.filter((column) => `${column.probe}.${column.metric}` === name).map((column) => column.heading);
  const parts = [...seen].flatMap(([name, { unit, definition, lengths }]) => {
    const told = [
      definition,
      unit && `Unit: ${unit}.`,
      lengths.length && `At context lengths ${lengths.join(", ")}.`,
      headings(name).length && `Shown as ${headings(name).join(", ")}.`,
    ];
    return [make("dt", { text: name }), make("dd", { text: told.filter(Boolean).join(" ") })];
  });
  byId("panel-metrics").replaceChildren(
    make("p", {
      text: "Losses are nats per token, accuracies and utilisation fractions, printed in %. The curves hold losses and times to seven digits; every other number is exact.",
    }),
    make("dl", {}, ...parts),
  );
}

// --- the page around it ---

function buildTabs() {
  const tabs = Object.entries(TABS).map(([name, text]) =>
    make("button", {
      type: "button",
      role: "tab",
      id: `tab-${name}`,
      "aria-controls": `panel-${name}`,
      text,
      on: { click: () => change({ tab: name }) },
    }),
  );
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
    const remove = make("button", {
      type: "button",
      text: "×",
      "aria-label": `Take out ${slug}`,
      on: { click: () => pick([cell], false) },
    });
    return make("span", { class: "chip" }, swatch(cell), make("span", { text: slug, title: slug }), remove);
  });
  const clear = make("button", { type: "button", text: "Clear", on: { click: () => change({ picked: [] }) } });
  const look =
    view.tab === "curves"
      ? null
      : make("button", { type: "button", text: "Show their curves", on: { click: () => change({ tab: "curves" }) } });
  byId("picked").replaceChildren(
    make("strong", { text: `${view.picked.length} picked` }),
    ...chips,
    ...(look ? [look] : []),
    clear,
  );
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
  byId("footer").textContent =
    `Written by atma-sweep ${data.version}. The file holds everything it shows and asks nothing of the network.`;
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
  byId("copy").addEventListener("click", () =>
    navigator.clipboard.writeText(location.href).then(
      () => say("The link is copied."),
      () => say("Copy the link from the address bar."),
    ),
  );
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
  for (const build of [
    buildHead,
    buildTabs,
    buildCells,
    buildCurves,
    buildEffects,
    buildFailures,
    buildProvenance,
    buildMetrics,
    listen,
  ])
    build();
  restore();
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}

start().catch((error) =>
  trouble(`This page could not be read: it needs a browser of 2024 or later (${error.message}).`),
);
