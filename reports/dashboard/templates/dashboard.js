// The page around the parts, and what starts it: the last of the scripts.
//
// A page that is served live calls `refresh({ core, answer })` when there is something new; it sets `blocks.read` first, so
// that effects and curves are fetched too. Nothing of the reader's place is lost: tab, filters, picked cells, order, scroll.

function buildTabs() {
  const tab = (name) => pressable(TABS[name], () => change({ tab: name }), { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` });
  byId("tabs").replaceChildren(...currentTabs().map(tab));
}

function moveTab(event) {
  const names = currentTabs();
  const place = names.indexOf(view.tab);
  const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: names.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  change({ tab: names[(to + names.length) % names.length] });
  byId(`tab-${view.tab}`).focus();
}

function drawTabs() {
  for (const name of currentTabs()) {
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
    const remove = pressable("\u00d7", () => pick([cell], false), { "aria-label": `Remove ${slug}` });
    return make("span", { class: "chip" }, legendLine(strokeOf(cell)), make("span", { text: slug, title: cellName(cell) }), remove);
  });
  const show = view.tab === "curves" ? "" : pressable("Show curves", () => change({ tab: "curves" }));
  const clear = pressable("Clear", () => change({ picked: [] }));
  byId("picked").replaceChildren(make("strong", { text: `${view.picked.length} picked` }), ...chips, show, clear);
  byId("picked").hidden = !view.picked.length || !["cells", "curves"].includes(view.tab);
}

const DRAW = {
  answer: drawAnswer, cells: drawCells, curves: drawCurves, effects: drawEffects, beside: drawBeside,
  figures: drawFigures, failures: drawFailures,
}; // prettier-ignore

function draw() {
  if (!data.tables[view.seeds]) view.seeds = "mean";
  document.documentElement.dataset.theme = view.theme;
  byId("theme").value = view.theme;
  byId("search").value = view.search;
  drawTabs();
  drawPicked();
  drawFilters();
  syncRadios();
  byId("matches").textContent = `${matchingCells().size} of ${data.cells.length} cells match`;
  byId("unfilter").hidden = !isFiltering();
  Promise.resolve(DRAW[view.tab]?.()).catch((error) => trouble(`This part cannot be shown: ${error.message}`));
}

function buildHead() {
  byId("title").textContent = `${data.sweep}, revision ${data.revision}`;
  const origin = data.printed ? `Numbers printed in ${data.printed}` : `Launched ${data.launched}`;
  const counts = Object.entries(Object.groupBy(data.cells, ({ state }) => state));
  const states = counts.map(([state, cells]) => `${cells.length} ${state}`).join(", ");
  byId("summary").textContent = `${data.cells.length} cells: ${states}. ${origin}.`;
  byId("footer").textContent = `Written by atma-sweep ${data.version}. The file is self-contained and works offline.`;
}

function listen() {
  byId("tabs").addEventListener("keydown", moveTab);
  let typing = -Infinity;
  byId("search").addEventListener("input", (event) => {
    // one step back undoes a whole word typed without a pause
    change({ search: event.target.value }, { quiet: performance.now() - typing < 1500 });
    typing = performance.now();
  });
  byId("theme").addEventListener("change", (event) => change({ theme: event.target.value }));
  byId("reset").addEventListener("click", () => change({ ...structuredClone(START), tab: view.tab, theme: view.theme }));
  byId("unfilter").addEventListener("click", () => change({ search: "", filters: {}, ranges: {} }));
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the view
    byId("main").focus();
  });
  byId("sheet-close").addEventListener("click", () => byId("sheet").close());
  byId("sheet").addEventListener("click", (event) => event.target === byId("sheet") && byId("sheet").close());
  addEventListener("popstate", restore);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  phone.addEventListener("change", draw);
  addEventListener("beforeprint", () => Grid.print(true));
  addEventListener("afterprint", () => Grid.print(false));
}

// --- data, and data that change ---

/** Takes over the core and the answer of a sweep. */
function take(core, answer) {
  data = core;
  data.answer = answer;
  data.indexOf = new Map(data.cells.map((cell, index) => [cell.id, index]));
  data.prepared = Object.fromEntries(Object.entries(data.tables).map(([name, table]) => [name, prepared(table)]));
  Object.values(data.prepared).forEach(measureWidths);
}

const BUILD = {
  head: [buildHead, (d) => [ d.sweep, d.revision, d.launched, d.cells.map((cell) => cell.state), ]],
  tabs: [buildTabs, currentTabs],
  answer: [buildAnswer, (d) => [Boolean(d.answer.beside), d.answer.declared.length > 0, d.sweep]],
  cells: [buildCells, (d) => Object.keys(d.tables)],
  filters: [() => delete byId("filter-groups").dataset.table, (d) =>
    [Object.values(d.tables).map(({ words, rows }) => [words, rows.map((row) => row.words)]), Object.values(d.tables).map(({ axes }) => axes)]],
  curves: [buildCurves, (d) => d.charts],
  effects: [buildEffects, () => 0],
  provenance: [buildProvenance, (d) => [d.audit, d.origins, d.grid, d.launched]],
  metrics: [buildMetrics, (d) => d.metrics],
};
/** Builds the parts whose data are others than before: the rest keeps its focus and what is open in it. */
function build() {
  for (const [name, [act, about]] of Object.entries(BUILD)) if (isNew(`built ${name}`, about(data))) act();
}

/** The folded parts by where they stand and what their heading says: most are made anew with newer data. */
const folds = () => [...document.querySelectorAll("details:has(> summary)")].map((fold) =>
    [`${fold.parentElement.closest("[id]")?.id} ${fold.querySelector("summary").textContent}`, fold]); // prettier-ignore

/** Shows newer data of the sweep, or those of another one; without an answer, the one before stands on. */
function refresh({ core, answer = data.answer }) {
  const ids = view.picked.map((cell) => data.cells[cell].id);
  const before = new Map(data.cells.map((cell) => [cell.id, JSON.stringify(cell.curve)]));
  const seen = [scrollX, scrollY];
  const open = new Map(folds().map(([name, fold]) => [name, fold.open]));
  byId("trouble").hidden = true;
  for (const grid of Grid.all) Object.assign(grid, { rows: [], keep: true }); // the reader's place stays
  take(core, answer);
  view.picked = ids.map((id) => data.indexOf.get(id)).filter((cell) => cell !== undefined);
  for (const cell of data.cells) if (before.get(cell.id) !== JSON.stringify(cell.curve)) curves.delete(cell.id);
  for (const block of [effects, beside, losses]) block.forget();
  pictures.version += 1;
  build();
  draw();
  for (const [name, fold] of folds()) fold.open = open.get(name) ?? fold.open;
  scrollTo({ left: seen[0], top: seen[1], behavior: "instant" });
}

async function start() {
  take(...(await Promise.all([inflateJson("core"), inflateJson("answer")])));
  byId("filters").open = !matchMedia("(max-width: 900px)").matches;
  build();
  listen();
  restore();
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}

const started = start();
started.catch((error) => trouble(`This page cannot be shown: it needs a browser from 2024 or later (${error.message}).`));
