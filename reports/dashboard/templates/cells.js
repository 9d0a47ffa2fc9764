// The cells: their table, the filters beside it, and where a number comes from.

const cellGrid = new Grid("Cells and their numbers", {
  onSort: sortBy,
  rowClass: (row) => (row.cells.every((cell) => view.picked.includes(cell)) ? "chosen" : ""),
  fixed: true,
  lines: true,
});

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
  const box = make("input", {
    type: "checkbox",
    "aria-label": `Draw the curves of ${rowName(row)}`,
    on: { change: () => pick(row.cells, box.checked) },
  });
  box.checked = row.cells.every((cell) => view.picked.includes(cell));
  return box;
}

function pick(cells, wanted) {
  const others = view.picked.filter((cell) => !cells.includes(cell));
  const picked = wanted ? [...others, ...cells] : others;
  if (picked.length > MOST_PICKED) {
    draw();
    say(`At most ${MOST_PICKED} cells can be drawn at once; remove some first.`);
    return;
  }
  change({ picked });
}

function numberButton(row, index, best) {
  const [text, value] = row.numbers[index];
  const kind = value === null ? "word" : best[index] !== null && parseFloat(text) === best[index] ? "best" : null;
  const states = value === null && row.states.length === 1 ? `state-${row.states[0].replace(" ", "-")}` : "";
  const open = () => showTrace(row, index);
  return make("button", {
    type: "button",
    class: [kind, states].filter(Boolean).join(" ") || null,
    text,
    title: kind === "best" ? "best of the rows shown" : null,
    on: { click: open },
  });
}

function stateText(row) {
  const text = row.states.join("/");
  return make("span", {
    class: row.states.length === 1 ? `state-${text.replace(" ", "-")}` : "word",
    text,
    title: data.cells[row.cells[0]].cause ?? text,
  });
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
    shade: (row) => heat(row, index, table.heat[index]),
  }));
  const name = (row) =>
    make("button", {
      type: "button",
      class: "name",
      text: rowName(row),
      title: rowName(row),
      on: { click: () => showCell(row.cells[0]) },
    });
  const box = { heading: "Pick", width: "2.9rem", cell: pickBox };
  const names = { heading: "Cell", sort: "Cell", width: table.nameWidth, header: true, cell: name };
  // on a phone the numbers stay: a name says its levels, and a number that is missing says the state
  if (phone.matches) return [{ ...names, width: Math.min(table.nameWidth, 14) }, ...mainFirst(numbers), box];
  return [
    box,
    names,
    ...words,
    { heading: "State", sort: "State", width: table.stateWidth, cell: stateText },
    ...numbers,
  ];
}

/** The shade of a number between the ends of its column: four steps of good and four of poor around the middle. */
function heat(row, index, ends) {
  const value = row.numbers[index][1];
  if (!ends || value === null) return null;
  const [poor, good] = ends;
  const share = Math.min(1, Math.max(0, (value - poor) / (good - poor))); // 1 where it is good, whichever sign that has
  const step = Math.min(4, Math.ceil(Math.abs(share - 0.5) * 8));
  return step ? `heat-${share > 0.5 ? "good" : "poor"}-${step}` : null;
}

/** By column: the poor and the good end of its shading, outliers of a twentieth at each end left out. */
function heatEnds(rows) {
  return data.columns.map((column, index) => {
    const values = rows.map((row) => row.numbers[index][1]).filter((value) => value !== null);
    values.sort((a, b) => a - b);
    const at = (share) => values[Math.round(share * (values.length - 1))];
    if (!column.better || values.length < 3 || at(0.05) === at(0.95)) return null;
    return column.better > 0 ? [at(0.05), at(0.95)] : [at(0.95), at(0.05)];
  });
}

/** The needle at its longest length, the others at theirs, then the rest. */
function mainFirst(numbers) {
  const longest = (index) => data.columns.findLastIndex((one) => one.probe === data.columns[index].probe) === index;
  const rank = (index) => (data.columns[index].probe === "needle" ? 0 : 1) + (longest(index) ? 0 : 2);
  return numbers
    .map((column, index) => [rank(index), column])
    .sort((a, b) => a[0] - b[0])
    .map(([, column]) => column);
}

function measureWidths(table) {
  table.heat = heatEnds(table.rows);
  table.widths = table.words.map((word, index) =>
    widest(
      word,
      table.rows.map((row) => row.words[index]),
      24,
    ),
  );
  table.numberWidths = data.columns.map((column, index) =>
    widest(
      column.heading,
      table.rows.map((row) => row.numbers[index][0]),
      22,
      700, // the best are bold
    ),
  );
  table.nameWidth = widest("Cell", table.rows.map(rowName), 34);
  table.stateWidth = widest(
    "State",
    table.rows.map((row) => row.states.join("/")),
    18,
  );
}

function drawCells() {
  const rows = sorted(matching());
  const table = tableNow();
  cellGrid.show(cellColumns(table, bestOf(rows)), rows, { column: view.sort, down: view.down });
}

function buildCells() {
  const seeds = data.tables.each
    ? radios("Several seeds as", "seeds", { mean: "mean ± sd", each: "one row per seed" })
    : null;
  const hint =
    "Press a number for its source, or a name for the complete cell; tick cells to draw their curves. Blue is good, orange poor, within the column; bold: best of the rows shown.";
  byId("panel-cells").replaceChildren(
    make("div", { class: "bar" }, seeds, make("p", { class: "hint", text: hint })),
    cellGrid.viewport,
    make("div", { class: "notes", id: "cell-notes" }),
  );
}

function buildNotes() {
  byId("cell-notes").replaceChildren(...data.notes.map((text) => make("p", { text })));
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
  for (const input of document.querySelectorAll("main input[type=radio]"))
    input.checked = view[input.name] === input.value;
}

// --- filters ---

function buildFilters() {
  const boxes = tableNow().groups.map((group) => {
    const levels = [...new Set(tableNow().rows.flatMap((row) => row.levels[group]))];
    return make(
      "fieldset",
      { "data-group": group },
      make("legend", { text: group }),
      make("div", { class: "levels" }, ...levels.map((level) => levelBox(group, level))),
    );
  });
  byId("filter-groups").replaceChildren(...boxes);
  byId("filter-groups").dataset.table = view.seeds;
}

function forgetFilters() {
  delete byId("filter-groups").dataset.table;
}

function levelBox(group, level) {
  const input = make("input", { type: "checkbox", on: { change: () => filter(group, level, input.checked) } });
  const label = make(
    "label",
    { class: "level" },
    input,
    make("span", { class: "name", text: level }),
    make("span", { class: "count" }),
  );
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
      if (group === "State")
        for (const cell of row.cells) counts.set(data.cells[cell].state, (counts.get(data.cells[cell].state) ?? 0) + 1);
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

// --- where a number comes from ---

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
  return make(
    "dl",
    { class: "facts" },
    ...known.flatMap(([name, value]) => [
      make("dt", { text: name }),
      make("dd", {}, value instanceof Node ? value : String(value)),
    ]),
  );
}

function commitText({ commit, dirty }) {
  return commit ? commit + (dirty ? " with changes" : "") : "not recorded";
}

function attemptFacts(id) {
  const attempt = data.attempts[id];
  if (!attempt) return [["Attempt", "none: this cell has no number here"]];
  return [
    [
      "Attempt",
      attempt.printed
        ? `${id} (the authors' run; nothing ran here)`
        : `${id} (number ${attempt.number} of its cell, ${attempt.kind}, ${attempt.state})`,
    ],
    ["Commit", commitText(attempt)],
    ["GPU or device", attempt.gpu ?? "not recorded"],
    ["Host", attempt.host],
    ["Started", attempt.started],
    ["Finished", attempt.finished],
    ["Deviation from the request", attempt.deviation ? JSON.stringify(attempt.deviation) : null],
  ];
}

function valueFacts(value) {
  if (!value) return [["Value", "not recorded"]];
  const [key, number, n, low, high, , reason] = value;
  return [
    ["Value", number === null ? "none" : `${digits(number)} ${data.keys[key].unit}`],
    ["Reason", reason],
    ["Samples", n ?? "not recorded"],
    ["95% interval", low === null || high === null ? null : `${digits(low)} to ${digits(high)}`],
  ];
}

function showTrace(row, index) {
  const column = data.columns[index];
  const [text, mean, sd, seeds, , attempts] = row.numbers[index];
  const whole = [
    ["Printed", text],
    ["Measures", definitionOf(column)],
  ];
  if (row.cells.length > 1)
    whole.push(
      ["Mean", digits(mean)],
      ["Standard deviation", sd === null ? null : digits(sd)],
      ["Seeds with the number", `${seeds} of ${row.cells.length}`],
    );
  const parts = row.cells.flatMap((cell, place) => {
    const { slug, id, state, cause } = data.cells[cell];
    const value = valueOf(cell, column);
    const about = [
      ["Cell", id],
      ["State", state],
      ["Cause", cause],
      ...valueFacts(value),
      ...attemptFacts(attempts[place]),
    ];
    return [
      make("h3", { text: slug }),
      facts([...about, ["Command", make("code", { text: `atma-sweep show ${id}` })]]),
    ];
  });
  openSheet(`${column.heading}: ${text}`, [facts(whole), ...parts]);
}

function showCell(cell) {
  const { slug, id, seed, state, cause, axes, values, curve, samples } = data.cells[cell];
  const levels = Object.entries(axes)
    .map(([axis, level]) => `${axis} ${level}`)
    .join(", ");
  const rows = values.map(([key, value, n, low, high, attempt, reason]) => {
    const { probe, metric, length, unit } = data.keys[key];
    const interval = low === null || high === null ? "" : `${digits(low)} to ${digits(high)}`;
    return [
      probe,
      metric,
      length ? lengthName(length) : "",
      value === null ? (reason ?? "") : digits(value),
      unit,
      n === null ? "" : String(n),
      interval,
      String(attempt),
    ];
  });
  const attempts = [...new Set([...values.map((value) => value[5]), ...(curve ? [curve.attempt] : [])])];
  openSheet(slug, [
    facts([
      ["Cell", id],
      ["Levels", levels],
      ["Seed", seed],
      ["State", state],
      ["Cause", cause],
    ]),
    make("h3", { text: "Measurements" }),
    rows.length
      ? plainTable(["Probe", "Metric", "Length", "Value", "Unit", "Samples", "95% interval", "Attempt"], rows)
      : make("p", { text: "No measurement was recorded." }),
    ...(samples ? [make("h3", { text: "Samples" }), samplesOf(samples)] : []),
    ...attempts.flatMap((attempt) => [make("h3", { text: `Attempt ${attempt}` }), facts(attemptFacts(attempt))]),
  ]);
}

/** What the network wrote during its training, the newest first; the prompt stands out from what follows it. */
function samplesOf(samples) {
  const text = (prompt, written) =>
    make("pre", { class: "sample" }, make("strong", { text: prompt }), document.createTextNode(written));
  const rows = [...samples].reverse().map(([step, prompt, written]) => [String(step), text(prompt, written)]);
  return plainTable(["After step", "Text"], rows);
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
  const table = make(
    "table",
    { class: "plain-table" },
    make("thead", {}, make("tr", {}, ...headings.map((text) => make("th", { scope: "col", text })))),
    body,
  );
  body.append(...rows.slice(0, MOST_LISTED).map(line));
  const box = make("div", { class: "scroll", role: "region", "aria-label": headings.join(", "), tabindex: "0" }, table);
  if (rows.length <= MOST_LISTED) return box;
  const more = make("button", {
    type: "button",
    text: `Show all ${rows.length}`,
    on: { click: () => (body.append(...rows.slice(MOST_LISTED).map(line)), more.remove()) },
  });
  return make("div", {}, box, more);
}
