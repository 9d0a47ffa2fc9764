// The cells: their table, the filters next to it, and where a number comes from.

const chosenClass = (row) => (isPicked(row) ? "chosen" : "");
const cellGrid = new Grid("Cells and their numbers", { onSort: sortBy, rowClass: chosenClass, fixed: true, lines: true });

/** First best first, or ascending; then the other way round; then the order of the start again. */
function sortBy(name) {
  const first = data.columns.find(({ heading }) => heading === name)?.better > 0;
  const now = sorting();
  if (now.column === name && now.down !== first) change({ sort: "", down: false });
  else change({ sort: name, down: now.column === name ? !first : first });
}

const rowName = ({ cells: [first, ...more] }) => data.cells[first].slug + (more.length ? ` and ${more.length} more seeds` : "");

/** A cell in plain words: its levels on the axes that vary, and its seed where seeds do. */
const cellName = (cell) => data.cells[cell].name;
const isPicked = (row) => row.cells.every((cell) => view.picked.includes(cell));
const stateClass = (word) => `state-${word.replaceAll(" ", "-")}`;

function pickBox(row) {
  const box = make("input", { type: "checkbox", "aria-label": `Draw the curves of ${rowName(row)}`, on: { change: () => pick(row.cells, box.checked) } });
  box.checked = isPicked(row);
  return box;
}

function pick(cells, wanted) {
  const others = view.picked.filter((cell) => !cells.includes(cell));
  const picked = wanted ? [...others, ...cells] : others;
  if (picked.length <= MAX_PICKED) return change({ picked });
  draw();
  say(`At most ${MAX_PICKED} cells can be drawn at once; remove some first.`);
}

function numberButton(row, index, best) {
  const [text, value] = row.numbers[index];
  const isBest = value !== null && best[index] !== null && parseFloat(text) === best[index];
  const kind = value === null ? `word ${row.states.length === 1 ? stateClass(row.states[0]) : ""}` : isBest ? "best" : null;
  return pressable(text, () => showTrace(row, index), { class: kind, title: isBest ? "best of the rows shown" : null });
}

const stateText = ({ states, cells }) =>
  make("span", { class: states.length === 1 ? stateClass(states[0]) : "word", text: states.join("/"), title: data.cells[cells[0]].cause });

/** The loss of the first cell of a row over training as a small line, on the same axes in every row. */
function sparkline(row) {
  const box = make("svg", { class: "spark", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
  losses().then(({ of, end, range }) => {
    const { x, y } = of.get(row.cells[0]) ?? { x: [], y: [] };
    const points = x.map((at, index) => `${(100 * at) / end} ${(100 * (range[1] - y[index])) / (range[1] - range[0])}`);
    box.setAttribute("aria-label", y.length ? `Loss over training, at last ${digits(y.at(-1))}` : "No loss recorded");
    box.append(make("path", { d: points.length ? `M${points.filter((_, index) => y[index] !== null).join("L")}` : "", "vector-effect": "non-scaling-stroke" }));
  }, () => {}); // prettier-ignore
  return box;
}

function cellColumns(table, best) {
  const words = table.words.map((heading, index) => ({
    heading: headingName(heading), sort: heading, width: table.widths[index], cell: (row) => levelName(heading, row.words[index]),
  })); // prettier-ignore
  const numbers = data.columns.map((column, index) => ({
    heading: column.heading, title: column.definition, sort: column.heading, number: true, width: table.numberWidths[index],
    cell: (row) => numberButton(row, index, best), shade: (row) => heat(row.numbers[index][1], table.heat[index]),
  })); // prettier-ignore
  const name = (row) => pressable(rowName(row), () => showCell(row.cells[0]), { class: "name", title: rowName(row) });
  const box = { heading: "Pick", width: "2.8rem", cell: pickBox };
  const names = { heading: "Cell", sort: "Cell", width: table.nameWidth, header: true, cell: name };
  // on a phone the numbers stay: a name says its levels, and a number that is missing says the state
  const ordered = data.order.map((index) => numbers[index]);
  const spark = { heading: "Loss", title: "Loss over training", width: "3.4rem", cell: sparkline };
  if (phone.matches) return [{ ...names, width: Math.min(table.nameWidth, 14) }, ...ordered, spark, box];
  const states = { heading: "State", sort: "State", width: table.stateWidth, cell: stateText };
  const unfinished = table.rows.some((row) => row.states.join() !== "done");
  return [box, names, spark, ...words, ...(unfinished ? [states] : []), ...ordered];
}

/** The shade of a number between the ends of its column: four steps of good and four of poor around the middle. */
function heat(value, ends) {
  if (!ends || value === null) return null;
  const [poor, good] = ends;
  const share = Math.min(1, Math.max(0, (value - poor) / (good - poor))); // 1 where it is good, whichever sign that has
  const step = Math.min(4, Math.ceil(Math.abs(share - 0.5) * 8));
  return step ? `heat-${share > 0.5 ? "good" : "poor"}-${step}` : null;
}

function measureWidths(table) {
  const column = (heading, text, most, weight) => widest(heading, table.rows.map(text), most, weight);
  table.widths = table.words.map((word, index) => column(headingName(word), (row) => levelName(word, row.words[index]), 24));
  table.numberWidths = data.columns.map(({ heading }, index) => column(heading, (row) => row.numbers[index][0], 22, 700)); // the best are bold
  table.nameWidth = column("Cell", rowName, 13);
  table.stateWidth = column("State", (row) => row.states.join("/"), 18);
}

function drawCells() {
  const rows = sorted(matching());
  part("cell-notes", data.notes, paragraphs);
  cellGrid.show(cellColumns(currentTable(), bestOf(rows)), rows, sorting());
}

/** The rows that match as text, in the order of the table. */
function cellRows() {
  const { words } = currentTable();
  const levels = (row) => row.words.map((level, index) => levelName(words[index], level));
  const lines = sorted(matching()).map((row) => [rowName(row), ...levels(row), row.states.join("/"), ...row.numbers.map(([text]) => text)]);
  return [["Cell", ...words.map(headingName), "State", ...data.columns.map(({ heading }) => heading)], lines];
}

function buildCells() {
  const seeds = data.tables.each ? radios("Several seeds as", "seeds", { mean: "mean \u00b1 sd", each: "one row per seed" }) : null;
  const hint = "Press a number for its source, or a name for the complete cell; tick cells to draw their curves. Green is better, purple worse, within the column; bold: best of the rows shown.";
  const section = panel("cell-table", "Cells", cellRows, { hint, more: seeds && make("div", { class: "bar" }, seeds), content: [cellGrid.viewport] });
  section.querySelector(".numbers").remove(); // the panel is a table already
  byId("panel-cells").replaceChildren(section, make("div", { class: "notes", id: "cell-notes" }));
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
  for (const input of document.querySelectorAll("main [type=radio]")) input.checked = view[input.name] === input.value;
}

// --- filters ---

function buildFilters() {
  const boxes = currentTable().groups.map((group) =>
    make("fieldset", { "data-group": group }, make("legend", { text: headingName(group) }), make("div", { class: "levels" })));
  byId("filter-groups").replaceChildren(...boxes, rangeBoxes());
  byId("filter-groups").dataset.table = view.seeds;
}

/** The least and the largest number that a row may have of a main measure: what the brush sets, for the keyboard. */
function rangeBoxes() {
  const inputs = currentTable().axes.filter(({ ends }) => ends).map(({ heading, unit }) => {
    const ends = ["least", "most"].map((word) => make("input", { type: "number", step: "any", "aria-label": `${heading}, ${word}${unit && `, ${unit}`}`, "data-range": heading, placeholder: word }));
    const set = () => {
      const [low, high] = ends.map((input) => (input.value === "" ? null : Number(input.value)));
      setRange(heading, low === null && high === null ? null : [low ?? -1e12, high ?? 1e12]);
    };
    ends.forEach((input) => input.addEventListener("change", set));
    return make("div", { class: "range" }, make("span", { text: heading }), ...ends);
  });
  return make("fieldset", { "data-ranges": true, hidden: !inputs.length }, make("legend", { text: "Ranges" }), ...inputs);
}

function levelBox(group, level) {
  const input = make("input", { type: "checkbox", on: { change: () => filter(group, level, input.checked) } });
  const [name, count] = [make("span", { class: "name", text: levelName(group, level) }), make("span", { class: "count" })];
  return make("label", { class: "level", "data-level": level }, input, name, count);
}

function filter(group, level, wanted) {
  const others = (view.filters[group] ?? []).filter((other) => other !== level);
  const levels = wanted ? [...others, level] : others;
  change({ filters: withEntry(view.filters, group, levels.length ? levels : null) });
}

/** Sets every box, and beside it how many cells the level has among those that the other filters let through. */
function drawFilters() {
  if (byId("filter-groups").dataset.table !== view.seeds) buildFilters();
  for (const input of document.querySelectorAll("[data-range]")) {
    const end = view.ranges[input.dataset.range]?.[input.placeholder === "least" ? 0 : 1] ?? null;
    if (input !== document.activeElement) input.value = end === null || Math.abs(end) === 1e12 ? "" : end;
  }
  for (const fieldset of document.querySelectorAll("#filter-groups [data-group]")) {
    const { group } = fieldset.dataset;
    const levels = [...new Set(currentTable().rows.flatMap((row) => row.levels[group]))];
    const box = fieldset.querySelector(".levels");
    if ([...box.children].map((label) => label.dataset.level).join("\n") !== levels.join("\n")) box.replaceChildren(...levels.map((level) => levelBox(group, level)));
    const levelOf = (row, cell) => (group === "State" ? data.cells[cell].state : row.levels[group][0]);
    const cells = matching(group).flatMap((row) => row.cells.map((cell) => levelOf(row, cell)));
    const counts = Object.groupBy(cells, (level) => level);
    for (const label of fieldset.querySelectorAll(".level")) {
      const count = counts[label.dataset.level]?.length ?? 0;
      label.querySelector("input").checked = (view.filters[group] ?? []).includes(label.dataset.level);
      label.querySelector(".count").textContent = count;
      label.classList.toggle("none", count === 0);
    }
  }
}

// --- where a number comes from ---

const valueOf = (cell, { probe, metric, length }) =>
  data.cells[cell].values.find(([key]) => data.keys[key].probe === probe && data.keys[key].metric === metric && data.keys[key].length === length) ?? null;

const interval = (low, high, scale) => (low === null || high === null ? "" : `${digits(low, scale)} to ${digits(high, scale)}`);

/** [name, value] pairs as a list of facts, without those that have no value. */
function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("dl", { class: "facts" }, ...known.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", {}, value instanceof Node ? value : String(value))]));
}

const attemptFacts = (id) => data.attempts[id] ?? [["Attempt", "none: this cell has no number here"]];

function valueFacts(value) {
  if (!value) return [["Value", "not recorded"]];
  const [key, number, n, low, high, , reason] = value;
  const { unit, scale } = data.keys[key];
  const text = number === null ? "none" : `${digits(number, scale)} ${unit}`.trim();
  return [["Value", text], ["Reason", reason], ["Samples", n ?? "not recorded"], ["95% interval", interval(low, high, scale)]];
}

/** Where the number of a row comes from: its cells, their values and attempts. */
function showTrace(row, index) {
  const column = data.columns[index];
  const [text, mean, sd, seeds, , attempts] = row.numbers[index];
  const several = [["Mean", digits(mean, column.percent ? 100 : 1)], ["Standard deviation", sd === null ? null : digits(sd, column.percent ? 100 : 1)], ["Seeds with the number", `${seeds} of ${row.cells.length}`]];
  const parts = row.cells.flatMap((cell, place) => {
    const { slug, id, state, cause } = data.cells[cell];
    const about = [["Cell", id], ["State", state], ["Cause", cause], ...valueFacts(valueOf(cell, column)), ...attemptFacts(attempts[place])];
    return [make("h3", { text: slug }), facts([...about, ["Command", make("code", { text: `atma-sweep show ${id}` })]])];
  });
  openSheet(`${column.heading}: ${text}`, [facts([["Printed", text], ["Measures", column.definition], ...(row.cells.length > 1 ? several : [])]), ...parts]);
}

const MEASUREMENT = ["Probe", "Metric", "Length", "Value", "Unit", "Samples", "95% interval", "Attempt"];

function showCell(cell) {
  const { slug, name, id, seed, state, cause, values, curve, samples } = data.cells[cell];
  const rows = values.map(([key, value, n, low, high, attempt, reason]) => {
    const { probe, metric, length, unit, scale } = data.keys[key];
    const texts = [value === null ? (reason ?? "") : digits(value, scale), unit, String(n ?? ""), interval(low, high, scale), String(attempt)];
    return [probe, metric.replaceAll("_", " "), length ? lengthName(length) : "", ...texts];
  });
  const attempts = [...new Set([...values.map((value) => value[5]), ...(curve ? [curve.attempt] : [])])];
  openSheet(slug, [
    facts([["Cell", id], ["Levels", name], ["Seed", seed], ["State", state], ["Cause", cause]]),
    make("h3", { text: "Measurements" }),
    rows.length ? plainTable(MEASUREMENT, rows) : make("p", { text: "No measurement was recorded." }),
    ...(samples ? [make("h3", { text: "Samples" }), samplesOf(samples)] : []),
    ...attempts.flatMap((attempt) => [make("h3", { text: `Attempt ${attempt}` }), facts(attemptFacts(attempt))]),
  ]);
}

/** What the network wrote during its training, the newest first; the prompt stands out from what follows it. */
function samplesOf(samples) {
  const text = (prompt, written) => make("pre", { class: "sample" }, make("strong", { text: prompt }), written);
  return plainTable(["After step", "Text"], samples.toReversed().map(([step, ...texts]) => [String(step), text(...texts)]));
}

function openSheet(title, content) {
  byId("sheet-title").textContent = title;
  byId("sheet-body").replaceChildren(...content);
  byId("sheet").showModal();
  byId("sheet").scrollTop = 0;
}

/** A table in full, for what is short or has long text; past MAX_LISTED rows a button asks for the rest. */
function plainTable(headings, rows) {
  const line = (row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell)));
  const body = make("tbody", {}, ...rows.slice(0, MAX_LISTED).map(line));
  const head = make("thead", {}, make("tr", {}, ...headings.map((text) => make("th", { scope: "col", text }))));
  const box = make("div", { class: "scroll", role: "group", "aria-label": headings.join(", "), tabindex: "0" }, make("table", { class: "plain-table" }, head, body));
  if (rows.length <= MAX_LISTED) return box;
  const more = pressable(`Show all ${rows.length}`, () => (body.append(...rows.slice(MAX_LISTED).map(line)), more.remove()));
  return make("div", {}, box, more);
}
