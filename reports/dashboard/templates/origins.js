// Figures, failures, provenance and metrics.

const pictures = { version: 0, seen: null }; // the version of the data, and what watches for figures that come into sight

/** The figures of the sweep: each is read, or drawn by the server, when it comes into sight. */
function drawFigures() {
  part("figure-list", data.answer.overview.figures, (figures) => figures.map(({ name, title }) =>
    make("figure", { class: "picture", id: `figure-of-${name}` }, make("h2", { text: title }), plain("Drawing."))));
  pictures.seen?.disconnect();
  pictures.seen = new IntersectionObserver((entries, seen) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => {
    seen.unobserve(target);
    showFigure(target);
  }), { rootMargin: "300px" });
  for (const figure of byId("figure-list").children) if (figure.dataset.version !== String(pictures.version)) pictures.seen.observe(figure);
}

async function showFigure(figure) {
  const { version } = pictures;
  const { title, text, svg, why } = await inflateJson(figure.id.replace("figure-of-", "figure-")).catch((error) => ({ why: error.message }));
  figure.dataset.version = version;
  const heading = make("h2", { text: title ?? figure.firstChild.textContent });
  if (why) return figure.replaceChildren(heading, plain(`Not drawn: ${why}`));
  figure.replaceChildren(heading, make("img", { src: `data:image/svg+xml,${encodeURIComponent(svg)}`, alt: title }), make("figcaption", { text }));
}

/** Failures of the cells that match. */
function drawFailures() {
  const { columns, rows, tracebacks, notes } = data.failures;
  const shown = new Set([...matchingCells()].map((cell) => data.cells[cell].slug));
  const open = (index) => pressable("Show", () => openSheet(rows[index][0], [make("pre", { text: tracebacks[index] })]), { "aria-label": `Traceback of ${rows[index][0]}` });
  const lines = rows.flatMap((row, index) => (isFiltering() && !shown.has(row[0]) ? [] : [[...row, tracebacks[index] ? open(index) : "none"]]));
  byId("panel-failures").replaceChildren(...notes.map((text) => make("p", { text })), lines.length ? plainTable([...columns, "Traceback"], lines) : "");
}

const originGrid = new Grid("Provenance of each cell's numbers");

function buildProvenance() {
  const { columns, rows } = data.origins;
  const audit = data.audit.length ? data.audit : ["The cells differ only in their axes."];
  byId("panel-provenance").replaceChildren(
    make("h2", { text: "Differences between cells" }),
    make("ul", {}, ...audit.map((text) => make("li", { text }))),
    make("h2", { text: "Code, machine and software" }),
    rows.length ? plainTable(["Origin", ...columns], rows.map((row, index) => [String(index + 1), ...row]))
      : make("p", { text: "No provenance is recorded: no cell has a number yet, or its attempts recorded none." }),
    make("h2", { text: "Provenance by cell" }),
    originGrid.viewport,
    make("h2", { text: "Grid" }),
    facts([data.printed ? ["Printed in", data.printed] : ["Launched", data.launched], ["Commit", commitText(data)]]),
    make("details", {}, make("summary", { text: "Grid file as launched" }), make("pre", { text: data.grid })),
  ); // prettier-ignore
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
    ["Cell", (row) => data.cells[row.cell].slug],
    ["Attempt", (row) => (row.id === null ? "no number yet" : String(row.id))],
    ["Origin", text(({ origin }) => (origin === null ? null : String(origin + 1)))],
    ["Commit", text(({ commit, dirty }) => commit && commitText({ commit: commit.slice(0, 12), dirty }))],
    ["GPU or device", text(({ gpu }) => gpu)],
    ["Host", text(({ host }) => host)],
    ["Finished", text(({ finished }) => finished)],
  ];
  originGrid.show(columns.map(([heading, cell], index) => ({ heading, cell, width: widest(heading, rows.map(cell), 36), header: !index })), rows);
}

function buildMetrics() {
  const hint = "Losses are nats per token, accuracies and utilisation fractions, printed in %. Numbers are shown to seven digits; `report --table 6 --json` has them in full.";
  byId("panel-metrics").replaceChildren(make("p", { text: hint }), make("dl", {}, ...data.metrics.flatMap(([name, text]) => [make("dt", { text: name }), make("dd", { text })])));
}
