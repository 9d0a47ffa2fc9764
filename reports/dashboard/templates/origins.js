// Figures, failures, provenance and metrics.

/** The figures of the sweep, each drawn when its tab is opened. */
function buildFigures() {
  parts.delete("figure-list");
  byId("panel-figures").replaceChildren(plain("The figures show all cells, whatever the filters."), make("div", { id: "figure-list" }));
}

async function drawFigures() {
  const { figures } = data.answer.overview;
  const sources = await Promise.all(figures.map(({ name }) => inflateText(`figure-${name}`)));
  part("figure-list", [figures, sources.map(({ length }) => length)], () => figures.map(({ name, title, text }, index) =>
    make("figure", { class: "picture", id: `figure-of-${name}` },
      make("h2", { text: title }),
      make("img", { src: `data:image/svg+xml,${encodeURIComponent(sources[index])}`, alt: title }),
      make("figcaption", { text })))); // prettier-ignore
}

/** Failures of the cells that match. */
function drawFailures() {
  const { columns, rows, tracebacks, notes } = data.failures;
  const shown = new Set([...matchingCells()].map((cell) => data.cells[cell].slug));
  const places = rows.map((_, index) => index).filter((index) => !isFiltering() || shown.has(rows[index][0]));
  const open = (index) => pressable("Show", () => openSheet(rows[index][0], [make("pre", { text: tracebacks[index] })]), { "aria-label": `Traceback of ${rows[index][0]}` });
  byId("panel-failures").replaceChildren(
    ...notes.map((text) => make("p", { text })),
    places.length ? plainTable([...columns, "Traceback"], places.map((index) => [...rows[index], tracebacks[index] ? open(index) : "none"])) : "",
  );
}

const originGrid = new Grid("Provenance of each cell's numbers");

function letter(index) {
  return index < 26 ? String.fromCharCode(65 + index) : letter(Math.floor(index / 26) - 1) + letter(index % 26);
}

function buildProvenance() {
  const { columns, rows } = data.origins;
  byId("panel-provenance").replaceChildren(
    make("h2", { text: "Differences between cells" }),
    auditList(),
    make("h2", { text: "Code, machine and software" }),
    rows.length ? plainTable(
          ["Origin", ...columns],
          rows.map((row, index) => [letter(index), ...row]),
        ) : make("p", { text: "No provenance is recorded: no cell has a number yet, or its attempts recorded none." }),
    make("h2", { text: "Provenance by cell" }),
    originGrid.viewport,
    make("h2", { text: "Grid" }),
    facts([data.printed ? ["Printed in", data.printed] : ["Launched", data.launched], ["Commit", commitText(data)]]),
    make("details", {}, make("summary", { text: "Grid file as launched" }), make("pre", { text: data.grid })),
  );
}

function auditList() {
  const lines = data.audit.length ? data.audit : ["The cells differ only in their axes."];
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
      text: "Losses are nats per token, accuracies and utilisation fractions, printed in %. Numbers are shown to seven digits; `report --table 6 --json` has them in full.",
    }),
    make("dl", {}, ...parts),
  );
}
