// The first page: the finding, needle accuracy, effects, losses and parallel coordinates, then the best and the design.

const losses = once(async () => {
  const all = await inflateJson("losses");
  const lines = [...all.lines, ...all.training].map(([cell, grid, loss]) => [cell, { x: all.grids[grid], y: loss }]);
  return { ...all, of: new Map(lines), end: Math.max(...lines.map(([, { x }]) => x.at(-1))), range: lateRange(column(lines, 1)) };
});

function buildAnswer() {
  for (const id of parts.keys()) if (!id.startsWith("built ")) parts.delete(id);
  const { declared, beside } = data.answer;
  const wide = { kind: "wide" };
  byId("panel-answer").replaceChildren(
    ...["finding", "care", "progress"].map((id) => make("div", { id, tabindex: -1 })),
    panel("needle", "Needle accuracy over context length", needleRows, wide),
    panel("effects-matrix", "Effect of each factor", () => data.answer.forest.table, {
      hint: "Mean difference over matched pairs, with its 95% interval. Green is better, purple worse; bold with a dot: significant. Press one for its pairs.",
    }),
    panel("loss", "Validation loss over training", lossRows, { more: make("span", { class: "small" }, select("loss-axis", "color", "Colour ")) }),
    panel("parallel", "All configurations, factor by factor and measure by measure", parallelRows, {
      ...wide, hint: "A line is a configuration. Drag along the axis of a measure, or press a level, to filter every panel of this page.",
    }),
    beside ? panel("beside-summary", `Comparison with ${beside.reference}`, null, wide) : "",
    declared.length ? panel("declared", "Declared contrasts", () => [DECLARED, declared], wide) : "",
    panel("best", "Best configurations", bestRows, wide),
    panel("design", "Design", null, wide),
  ); // prettier-ignore
}

async function drawAnswer() {
  const { best, declared, forest, needle, overview, beside } = data.answer;
  const filters = filterKey();
  part("finding", [overview.finding, isFiltering()], () => findingParts(overview.finding));
  part("care", [...data.care, ...(data.answer.care ?? [])], careParts);
  part("progress", data.progress, progressParts);
  part("needle", [needle, filters], () => needleParts(needle, "needle", overview));
  part("effects-matrix", [forest, filters], () => matrixParts(forest));
  part("parallel", [data.tables[view.seeds], filters], parallelParts);
  if (beside) part("beside-summary", beside, besideParts);
  part("best", [best, filters], () => bestParts(matchingBest(best)));
  if (declared.length) part("declared", declared, declaredParts);
  part("design", data.asked, designParts);
  await drawLosses();
}

const declaredParts = (rows) => [plainTable(DECLARED, rows),
  hint("Declared in the grid before the launch and corrected together; everything else on this page is exploratory.")]; // prettier-ignore
const DECLARED = ["Measure", "Contrast", "Difference", "95% interval", "p, corrected", "Pairs", "Verdict"];

// --- the finding, cautions, progress, design ---

const findingParts = ({ text, more }) =>
  [make("p", { class: "finding", text }), ...paragraphs(more), isFiltering() ? hint("Of all cells, whatever the filters.") : null]; // prettier-ignore

function careParts(lines) {
  if (!lines.length) return [plain("No cautions: the cells differ only in their axes, and none is missing.")];
  const count = lines.length === 1 ? "1 caution" : `${lines.length} cautions`;
  return [make("details", {}, make("summary", { text: `${count} on these numbers` }), bulleted(lines))];
}

/** Cells by state: only those done fill the bar; those that run are hatched, what waits stays empty. */
function progressParts({ counts, running, left, runs }) {
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  if (counts.length === 1 && counts[0][0] === "done" && !runs) return [];
  const text = counts.map(([word, count]) => `${count} ${word}`).join(", ");
  const shares = counts.map(([word, count]) => make("span", { class: `share ${stateClass(word)}`, title: `${count} ${word}` }));
  shares.forEach((share, index) => (share.style.width = `${(100 * counts[index][1]) / total}%`));
  const bar = make("div", { class: "progress", role: "img", "aria-label": `Of ${total} cells: ${text}` }, ...shares);
  const eta = left ? `About ${left} left at the current speed.` : runs ? "Remaining time not known yet." : "";
  const rows = running.map(({ slug, doing, left }) => [slug, doing, left ? `${left} left` : ""]);
  const table = rows.length ? plainTable(["Running", "Activity", "Time"], rows) : null;
  return [bar, make("p", { text: `Of ${total} cells: ${text}. ${eta}` }), table];
}

function designParts({ axes, facts: more }) {
  const rows = axes.map(({ words, levels }) => [words.includes(".") ? words : capitalized(words), levels.join(" · ")]);
  return [facts([...rows, ...more])];
}

// --- needle accuracy ---

/** Panels with means over the cells that match; the intervals are of all cells, and stand only where all match. */
function needlePanels({ panels }, { groups, group }) {
  if (!isFiltering() || !group.length) return panels; // filters know nothing of another sweep
  const cells = matchingCells();
  const chart = data.charts.find(({ probe }) => probe === "needle");
  const known = [...cells].flatMap((cell) =>
      lengthPoints(cell, chart).filter(({ value }) => isNumber(value)).map((point) => ({ ...point, name: `${group[cell]} ${point.length}` }))); // prettier-ignore
  const values = Object.groupBy(known, ({ name }) => name); // the points of the matching cells by group and length
  const pointsOf = (index, points) => points.flatMap(([length]) => {
      const shares = values[`${index} ${length}`]?.map(({ value }) => 100 * value);
      return shares ? [[length, average(shares), null, null, shares.length]] : [];
    }); // prettier-ignore
  const placeOf = (panel, line) => groups.findIndex(([title, name]) => title === panel.title && name === line.name);
  const filtered = (panel) => panel.lines.map((line) => ({ ...line, points: pointsOf(placeOf(panel, line), line.points) }));
  return panels.map((panel) => ({ ...panel, lines: filtered(panel) }));
}

function needleParts(needle, id, overview) {
  if (needle.why) return [plain(needle.why)];
  const panels = needlePanels(needle, overview);
  const known = new Map(needle.panels.flatMap(({ lines }) => lines.map((line) => [line.name, line])));
  const names = [...known.keys()];
  const { lengths } = needle;
  const look = ({ name, label, look: { dash, open, mark } }, color) => ({ name: label, group: name, color, dash, points: open ? "open" : "fill", mark });
  const several = panels.length > 1;
  const constant = { name: "constant digit", group: "constant", color: ink("--quiet"), dash: [2, 3], width: 1.2 };
  const ids = panels.map((_, index) => `${id}-chart-${index}`);
  const charts = panels.map(({ title, lines }, index) => {
    const series = lines.map((line) => ({
      ...look(line, several ? mixerColor(title) : lineColor(names.indexOf(line.name))),
      ...Object.fromEntries(["x", "y", "low", "high"].map((name, place) => [name, column(line.points, place)])),
    }));
    if (needle.ceiling?.length) series.push({ ...constant, x: column(needle.ceiling, 0), y: column(needle.ceiling, 1) });
    return captioned(title, chartBox(ids[index], {
      series, height: 190, log: lengths.length > 1 ? "x" : "", xSplits: lengths, xText: lengthName, xRule: needle.trained,
      yText: (value) => `${Number(value.toFixed(1))}`, xTitle: "context length, tokens", yTitle: index ? "" : "digits recalled, %",
      range: [0, needle.top], key: title, label: `Needle accuracy of ${title} over context length`, empty: "No matching cell.",
    }));
  }); // prettier-ignore
  const entries = [...known.values()].map((line, index) => look(line, several ? ink("--ink") : lineColor(index)));
  if (needle.ceiling?.length) entries.push({ ...constant, name: `constant digit, ${needle.ceiling_text}` });
  const trained = isNumber(needle.trained) && lengths.includes(needle.trained) ? ` Dashed upright line: training length, ${lengthName(needle.trained)}.` : "";
  return [
    make("div", { class: "panels" }, ...charts),
    legend(ids, entries),
    make("p", { class: "hint", text: `${isFiltering() ? "Means over the matching cells, without intervals." : needle.note}${trained}` }),
  ];
}

function needleRows(needle = data.answer.needle) {
  const percent = (share) => (isNumber(share) ? share.toFixed(1) : "");
  const lines = needlePanels(needle, data.answer.overview).flatMap(({ title, lines }) => lines.flatMap(({ label, points }) =>
      points.map(([length, value, low, high, cells]) => [title, label, length, percent(value), percent(low), percent(high), cells])));
  return [["Mixer", "Line", "Context length", "Needle accuracy, %", "95% low", "95% high", "Cells"], lines];
}

// --- effects: factor by measure ---

/** The mean difference over pairs of matching cells that agree on all other axes and the seed: {mean, pairs}, or null. */
function pairedDifference({ factor, sides }, measure) {
  const column = data.columns.find(({ heading }) => heading === measure.heading);
  if (!column) return null;
  const byRest = {};
  for (const cell of matchingCells()) {
    const { axes, seed } = data.cells[cell];
    const side = sides.indexOf(axes[factor] ?? "-");
    if (side >= 0) (byRest[JSON.stringify([{ ...axes, [factor]: "", seed: "" }, seed])] ??= [])[side] = valueOf(cell, column)?.[1];
  }
  const differences = Object.values(byRest).filter(([one, two]) => isNumber(one) && isNumber(two)).map(([one, two]) => one - two);
  return differences.length ? { mean: average(differences) * (column.percent ? 100 : 1), pairs: differences.length } : null;
}

function matrixParts(forest) {
  if (forest.why) return [plain(forest.why)];
  const lines = forest.lines.map((line) => ({ ...line, cells: line.cells.map((row) => forest.rows[row] ?? null) }));
  const filtered = isFiltering();
  const numbers = lines.map((line) => line.cells.map((cell, index) => (cell && filtered ? pairedDifference(line, forest.measures[index]) : cell)));
  const most = forest.measures.map((_, index) => Math.max(...numbers.map((row) => Math.abs(row[index]?.mean ?? 0))) || 1);
  const cellOf = (line, place, measure, index) => {
    const all = line.cells[index];
    const now = numbers[place][index];
    if (!all || !now || now.mean === null) return make("td", { text: "\u2013", "aria-label": "no pairs" });
    const sure = all.sure && !filtered;
    const side = measure.better * now.mean;
    const shade = Math.min(4, Math.ceil((4 * Math.abs(now.mean)) / most[index]));
    const kind = !side ? "" : ` heat-${side > 0 ? "good" : "poor"}-${filtered || sure ? shade : Math.min(1, shade)}`;
    const [value, second] = filtered ? [signed(now.mean, measure.percent ? 1 : 3), `${now.pairs} pairs`] : all.shown;
    const mixed = all.mixed && !filtered ? ", differs between strata" : "";
    const text = `${measure.heading}: ${line.level} against ${line.reference}, ${value} (${second})${sure ? ", significant" : ""}${mixed}`;
    const open = () => change({ tab: "effects", measure: measure.heading, axis: line.factor, within: EVERY });
    const press = pressable("", open, { class: sure ? "sure" : null, "aria-label": text, title: "Show its strata and pairs" });
    press.append(make("span", { text: `${value}${sure ? " \u25cf" : ""}${mixed ? " \u2248" : ""}` }), make("small", { text: second }));
    return make("td", { class: `n${kind}` }, press);
  };
  const family = (text) => make("tr", { class: "family" }, make("th", { scope: "rowgroup", colspan: forest.measures.length + 1, text }));
  const body = lines.flatMap((line, place) => {
    const head = make("th", { scope: "row" }, line.level, make("small", { text: `against ${line.reference}` }));
    const row = make("tr", {}, head, ...forest.measures.map((measure, index) => cellOf(line, place, measure, index)));
    return line.axis === lines[place - 1]?.axis ? [row] : [family(line.axis), row];
  });
  const headings = forest.measures.map(({ heading, scale }) => make("th", { scope: "col", class: "n" }, heading, make("small", { text: scale })));
  return [
    make("div", { class: "scroll", role: "region", "aria-label": "Effects, factor by measure", tabindex: 0 },
      make("table", { class: "matrix" }, make("thead", {}, make("tr", {}, make("th", { scope: "col", text: "Factor" }), ...headings)), make("tbody", {}, ...body))),
    filtered ? make("p", { class: "hint", text: "Filtered: means over the pairs of matching cells, without a test." }) : null,
    !filtered && lines.some(({ cells }) => cells.some((cell) => cell?.mixed)) ? make("p", { class: "hint", text: "\u2248 The effect differs between mixers or memories: press it for each." }) : null,
  ]; // prettier-ignore
}

// --- losses of all cells ---

/** The mean over the lines that reach the end of training: a cell on its way, or cut off, would move it sideways. */
function meanLine(lines, { grids }, end) {
  const whole = lines.filter(([, grid]) => grids[grid].at(-1) >= 0.999 * end);
  if (whole.length < 2 || new Set(whole.map(([, grid]) => grid)).size > 1) return null;
  const [[, grid, first]] = whole;
  const mean = first.map((_, index) => (whole.some(([, , loss]) => loss[index] === null) ? null : average(whole.map(([, , loss]) => loss[index]))));
  return { x: grids[grid], y: mean, count: whole.length };
}

async function drawLosses() {
  const all = await losses();
  if (view.tab !== "answer") return;
  const { axes } = data.answer.overview;
  const axis = axes.find(({ name }) => name === view.color) ?? axes[0] ?? null;
  options("loss-axis", axes.map(({ name, words }) => [name, words]), axis?.name);
  byId("loss-axis").parentElement.hidden = !axes.length;
  part("loss", [all.lines.length, data.cells.map(({ id, curve }) => [id, curve?.points]), axis, filterKey()], () => lossParts(all, axis));
}

function lossParts(all, axis) {
  if (!all.lines.length && !all.training.length) return [plain("No attempt has recorded a loss during training.")];
  const cells = isFiltering() ? matchingCells() : null;
  const mixer = (name) => (axis?.name === "attn_type" ? { color: mixerColor(name) } : {});
  const levels = (axis?.labels ?? ["all cells"]).map((name, index) => ({ name, group: name, ...lineLook(index), ...mixer(name) }));
  const level = (cell) => levels[axis ? axis.levels.indexOf(data.cells[cell].axes[axis.name] ?? "-") : 0];
  const kept = (lines) => lines.filter(([cell]) => !cells || cells.has(cell));
  const [val, train] = [kept(all.lines), kept(all.training)];
  const share = Math.max(0.12, Math.min(0.6, 12 / Math.max(1, val.length)));
  const series = (lines, kind) => lines.map(([cell, grid, loss]) => ({
      name: `${cellName(cell)}${kind}`, group: level(cell)?.name, color: faded(level(cell)?.color ?? ink("--quiet"), kind ? 0.9 : share), dash: level(cell)?.dash,
      width: 1, x: all.grids[grid], y: loss, pick: () => showCell(cell), points: loss.length === 1 ? "small" : null,
    })); // prettier-ignore
  const ends = val.map(([, grid]) => all.grids[grid].at(-1));
  const means = levels.flatMap((one) => {
    const mean = meanLine(val.filter(([cell]) => level(cell) === one), all, Math.max(...ends));
    return mean ? [{ ...one, ...mean, name: `mean of ${one.name} (${mean.count} cells)`, width: 3 }] : [];
  });
  const lines = [...series(train, ", training loss"), ...series(val, ""), ...means];
  const present = levels.filter((one) => [...val, ...train].some(([cell]) => level(cell) === one));
  const running = train.length ? ` Training loss of cells with fewer than two validation losses: ${train.length}.` : "";
  return [
    chartBox("loss-chart", {
      series: lines, height: 300, range: lateRange(lines), xTitle: "tokens of training", yTitle: "loss, nats per token", key: axis?.name,
      label: `Validation loss over training tokens of ${val.length} cells`, empty: "No matching cell has a loss.",
    }),
    legend(["loss-chart"], present),
    make("p", { class: "hint", text: `${means.length ? "Thick: means over the cells of a level that have come furthest." : ""}${running} Drag to enlarge, double-click to show all.` }),
  ];
}

/** From the least to the largest loss after the first tenth of training, which would flatten all that follows. */
function lateRange(lines) {
  const end = Math.max(...lines.map(({ x }) => x.at(-1)));
  const late = lines.flatMap(({ x, y }) => Array.from(y).filter((value, index) => isNumber(value) && x[index] >= end / 10));
  if (late.length < 2) return null;
  const [low, high] = late.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  const margin = 0.06 * (high - low) || 0.1;
  return [low - margin, high + margin];
}

async function lossRows() {
  const all = await losses();
  const cells = matchingCells();
  const lines = [["validation", all.lines], ["training", all.training]].flatMap(([kind, lines]) =>
    lines.filter(([cell]) => cells.has(cell)).flatMap(([cell, grid, loss]) => loss.map((value, index) => [data.cells[cell].slug, kind, all.grids[grid][index], value ?? ""])));
  return [["Cell", "Loss", "Tokens", "Nats per token"], lines];
}

// --- best configurations ---

const chanceText = (share) => (!isNumber(share) ? "" : share < 0.005 ? "<1%" : share > 0.995 ? ">99%" : `${Math.round(100 * share)}%`);

/** The rankings, or where filters leave some configurations only, their five best without intervals and probabilities. */
function matchingBest(best) {
  if (!isFiltering()) return best;
  const measures = best.measures.map((measure) => {
    const rows = matching().filter((row) => isNumber(printedNumber(row, measure.heading)));
    rows.sort((a, b) => measure.better * (printedNumber(b, measure.heading) - printedNumber(a, measure.heading)));
    const column = data.columns.findIndex(({ heading }) => heading === measure.heading);
    const words = (row) => [row.cells.length > 1 ? cellName(row.cells[0]).replace(/(, )?seed \d+$/, "") : cellName(row.cells[0])];
    const ranked = rows.slice(0, 5).map((row) =>
        ({ cells: row.cells.map((cell) => data.cells[cell].id), text: row.numbers[column][0], interval: "", chance: null, words: words(row) })); // prettier-ignore
    return { ...measure, rows: ranked, of: rows.length, how: "Of the matching cells; without intervals." };
  });
  return { ...best, measures };
}

function bestParts({ measures, why }) {
  if (why) return [plain(why)];
  const ranking = ({ heading, unit, better, rows, of, how }) => {
    const chances = rows.some(({ chance }) => isNumber(chance));
    const lines = rows.map(({ cells, words, text, interval, chance }) => [
      pressable(words.join(", "), () => showCell(data.indexOf.get(cells[0])), { class: "words" }),
      make("strong", { text }), interval, ...(chances ? [chanceText(chance)] : []),
    ]); // prettier-ignore
    const more = `${rows.length < of ? `First ${rows.length} of ${of} configurations; unlisted` : "Unlisted"} factors are off. `;
    return make("div", { class: "ranking" },
      make("h3", { text: `${heading}: ${better < 0 ? "less" : "more"} is better` }),
      rows.length ? plainTable(["Configuration", unit === "%" ? "%" : unit, "95% interval", ...(chances ? ["P(best)"] : [])], lines) : null,
      make("p", { class: "hint", text: `${rows.length ? more : ""}${how}` })); // prettier-ignore
  };
  return [make("div", { class: "rankings" }, ...measures.map(ranking))];
}

function bestRows() {
  const lines = matchingBest(data.answer.best).measures.flatMap(({ heading, rows }) => rows.map(({ words, text, interval, chance }, index) => [heading, index + 1, words.join(", "), text, interval, chanceText(chance)]));
  return [["Measure", "Place", "Configuration", "Value", "95% interval", "P(best)"], lines];
}
