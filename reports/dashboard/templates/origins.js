// Figures, failures, provenance and metrics.

const pictures = { version: 0, seen: null }; // the version of the data, and what watches for figures that come into sight

/** The figures of the sweep: each is read, or drawn by the server, when it comes into sight. */
function drawFigures() {
  const { figures } = data.answer.overview;
  part("figure-list", figures, () => figures.length
    ? figures.map(({ name, title }) => make("figure", { class: "picture", id: `figure-of-${name}` }, make("h2", { text: title }), plain("Drawing.")))
    : [plain("This page was written without figures. This command writes it with every figure of the sweep:"),
      make("pre", { text: `atma-sweep report --sweep ${data.sweep} --dashboard FILE.html --figures` })]);
  if (!figures.length) return;
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

function buildProvenance() {
  const { columns, rows } = data.origins;
  const audit = data.audit.length ? data.audit : ["The cells differ only in their axes."];
  byId("panel-provenance").replaceChildren(
    make("h2", { text: "Differences between cells" }),
    make("ul", {}, ...audit.map((text) => make("li", { text }))),
    make("h2", { text: "Code, machine and software" }),
    rows.length ? plainTable(columns, rows)
      : make("p", { text: "No provenance is recorded: no cell has a number yet, or its attempts recorded none." }),
    make("p", { class: "hint", text: "Press a number of a cell for the commit, machine and attempt that it comes from." }),
    make("h2", { text: "Grid" }),
    facts([data.printed ? ["Printed in", data.printed] : ["Launched", data.launched], ["Commit", data.commit]]),
    make("details", {}, make("summary", { text: "Grid file as launched" }), make("pre", { text: data.grid })),
  ); // prettier-ignore
}

function buildMetrics() {
  const hint = "Losses are nats per token, accuracies and utilisation in %. Numbers are shown to seven digits; `report --table 6 --json` has them in full.";
  byId("panel-metrics").replaceChildren(make("p", { text: hint }), make("dl", {}, ...data.metrics.flatMap(([name, text]) => [make("dt", { text: name }), make("dd", { text })])));
}
