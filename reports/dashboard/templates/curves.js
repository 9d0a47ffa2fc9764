// The curves of the picked cells, over training and against context length, and the difference of two of them.

const curves = new Map();

/** The training and the validation series of a cell: {tokens, wall, loss}, from bytes grouped by significance. */
async function curveOf(cell) {
  const { id, curve } = data.cells[cell];
  if (curves.has(id)) return curves.get(id);
  const bytes = new Uint8Array(await blocks.read(`curve-${id}`));
  let from = 0;
  const column = (count, Kind) => {
    const size = Kind.BYTES_PER_ELEMENT;
    const places = bytes.subarray(from, (from += size * count));
    return new Kind(places.map((_, index) => places[(index % size) * count + Math.floor(index / size)]).buffer);
  };
  curves.set(id, curve.kept.map((count) => {
    let sum = 0;
    const tokens = column(count, Float64Array).map((step) => (sum += step));
    return { tokens, wall: column(count, Float32Array), loss: column(count, Float32Array) };
  })); // prettier-ignore
  return curves.get(id);
}

/** Colour and dash of the picked cells, the same in every chart. */
const strokeOf = (cell) => lineLook(view.picked.indexOf(cell));

/** The exponential moving average of a loss, with the start not pulled to zero; gaps stay. */
function smoothed(losses, weight) {
  let [sum, norm] = [0, 0];
  return Array.from(losses, (loss) => {
    if (Number.isNaN(loss)) return null;
    [sum, norm] = [weight * sum + (1 - weight) * loss, weight * norm + (1 - weight)];
    return sum / norm;
  });
}

function trainingSeries(cell, [train, val]) {
  const { color, dash } = strokeOf(cell);
  const name = cellName(cell);
  const x = ({ tokens, wall }) => Array.from(view.x === "wall" ? wall : tokens);
  const weight = Number(view.smooth);
  const common = { group: data.cells[cell].id, dash, pick: () => showCell(cell) };
  const training = { name: `${name}, training${weight ? ", smoothed" : ""}`, x: x(train), y: smoothed(train.loss, weight), color: faded(color, 0.6), width: 1, points: train.loss.length === 1 ? "small" : null };
  const validation = { name: `${name}, validation`, x: x(val), y: smoothed(val.loss, 0), color, width: 2.4, points: "small" };
  return [training, validation].map((line) => unique({ ...line, ...common }));
}

/** The line without points that do not lie to the right of the one before, such as times after a restart. */
function unique(line) {
  const places = line.x.map((at, index) => index).filter((index) => !index || line.x[index] > line.x[index - 1]);
  return places.length === line.x.length ? line : { ...line, x: places.map((index) => line.x[index]), y: places.map((index) => line.y[index]) };
}

function lengthPoints(cell, { probe, metric }) {
  const rows = data.cells[cell].values.filter(([key]) => data.keys[key].probe === probe && data.keys[key].metric === metric);
  const points = rows.map(([key, value, n, low, high, , reason]) => ({ length: data.keys[key].length, value, n, low, high, reason }));
  return points.sort((a, b) => a.length - b.length);
}

function lengthSeries(cell, chart) {
  const points = lengthPoints(cell, chart).filter(({ value }) => value !== null);
  const scale = (value) => (isNumber(value) ? (chart.percent ? 100 : 1) * value : null);
  return {
    name: cellName(cell), group: data.cells[cell].id, ...strokeOf(cell), width: 2, points: "small", pick: () => showCell(cell),
    x: points.map(({ length }) => length), y: points.map(({ value }) => scale(value)),
    low: points.map(({ low }) => scale(low)), high: points.map(({ high }) => scale(high)),
  }; // prettier-ignore
}

function buildCurves() {
  const smooth = make("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01, on: { change: (event) => change({ smooth: event.target.value }) } });
  const chartOf = ({ title, probe, hint }) =>
    make("div", {}, make("h3", { text: title }), make("div", { id: `chart-${probe}` }), hint ? make("p", { class: "hint", text: hint }) : null);
  const log = (axis, text) => {
    const box = make("input", { type: "checkbox", id: `log-${axis}`, on: { change: () => change({ log: ["x", "y"].filter((one) => byId(`log-${one}`).checked).join("") }) } });
    return make("label", {}, box, text);
  };
  byId("panel-curves").replaceChildren(
    make("p", { id: "curves-hint", class: "hint", role: "status" }),
    make("div", { id: "curves-all", hidden: true },
      make("div", { class: "bar" },
        radios("Against", "x", { tokens: "tokens", wall: "wall time" }),
        make("label", {}, "Smoothing ", smooth), log("x", "log x"), log("y", "log y")),
      panel("training", "Loss over training", trainingRows, {
        hint: "Thin: training loss, where stored. Thick with points: validation loss.",
        content: [make("div", { id: "chart-training" }), make("div", { id: "training-legend" })],
      }),
      make("p", { class: "hint", id: "curves-missing" }),
      panel("difference", "Difference of two cells", differenceRows),
      panel("lengths", "Numbers over context length", numbersByLength, { content: [make("div", { class: "charts" }, ...data.charts.map(chartOf))] }))); // prettier-ignore
}

function missingCurves(cells) {
  const without = cells.filter((cell) => !data.cells[cell].curve).map(cellName);
  const thinned = cells.map((cell) => data.cells[cell].curve).filter((curve) => curve?.kept.some((count, index) => count < curve.all[index]));
  const shown = thinned.slice(0, 1).map(({ kept, points }) =>
      `Thinned, since the sweep is large: ${thinned.length} curves; the first shows ${kept[0] + kept[1]} of ${points} points.`); // prettier-ignore
  return [...(without.length ? [`No training curve is recorded for ${without.join(", ")}.`] : []), ...shown].join(" ");
}

async function trainingRows() {
  const cells = picked().filter((cell) => data.cells[cell].curve);
  const series = await Promise.all(cells.map(curveOf));
  const lines = cells.flatMap((cell, index) => ["training", "validation"].flatMap((kind, side) => {
    const { tokens, wall, loss } = series[index][side];
    return Array.from(tokens, (at, item) => [data.cells[cell].slug, kind, at, digits(wall[item]), Number.isNaN(loss[item]) ? "" : digits(loss[item])]);
  })); // prettier-ignore
  return [["Cell", "Loss", "Tokens", "Wall seconds", "Nats per token"], lines];
}

function numbersByLength() {
  const lines = picked().flatMap((cell) => data.charts.flatMap((chart) => lengthPoints(cell, chart).map(({ length, value, n, reason }) =>
    [data.cells[cell].slug, chart.title, lengthName(length), value === null ? (reason ?? "") : digits(chart.percent ? 100 * value : value), chart.unit, n ?? ""]))); // prettier-ignore
  return [["Cell", "Measure", "Length", "Value", "Unit", "Samples"], lines];
}

/** Every number of the table in the first two picked cells, and the second minus the first. */
function differenceRows() {
  const [one, two] = picked();
  if (two === undefined) return [["Measure"], []];
  const lines = data.columns.flatMap((column) => {
    const values = [one, two].map((cell) => valueOf(cell, column)?.[1]).map((value) => (isNumber(value) ? (column.percent ? 100 : 1) * value : null));
    if (values.includes(null)) return [];
    const decimals = column.percent ? 1 : 3;
    return [[column.heading, ...values.map((value) => value.toFixed(decimals)), signed(values[1] - values[0], decimals), verdict(column.better * (values[1] - values[0]))]];
  });
  return [["Measure", cellName(one), cellName(two), "Difference", "Second is"], lines];
}

const verdict = (gain) => (gain > 0 ? "better" : gain < 0 ? "worse" : "");

/** The validation loss of the second cell minus that of the first, where both were measured at the same tokens. */
function differenceParts(series) {
  const cells = picked();
  if (cells.length !== 2) return [plain("Pick exactly two cells to see their difference.")];
  const table = plainTable(...differenceRows());
  if (series.length < 2) return [table];
  const first = new Map(Array.from(series[0][1].tokens, (at, index) => [at, series[0][1].loss[index]]));
  const both = Array.from(series[1][1].tokens, (at, index) => [at, series[1][1].loss[index] - first.get(at)]).filter(([, value]) => isNumber(value));
  const line = { name: "difference in validation loss", group: "difference", color: ink("--accent"), width: 2, points: "small", x: column(both, 0), y: column(both, 1) };
  return [table, both.length < 2 ? null : chartBox("chart-difference", {
    series: [line], height: 230, xTitle: "tokens of training", yTitle: "difference, nats per token", key: String(cells),
    label: "Validation loss of the second cell minus that of the first",
  })]; // prettier-ignore
}

/** The picked cells that filters leave. */
const picked = (cells = matchingCells()) => view.picked.filter((cell) => cells.has(cell));

let drawingNumber = 0;

async function drawCurves() {
  const mine = ++drawingNumber;
  const cells = picked();
  byId("curves-all").hidden = !cells.length;
  const hidden = view.picked.length - cells.length;
  byId("curves-hint").textContent = cells.length ? "Loading the curves." : `Tick cells under Cells to see their training, their numbers over context length and their difference.${hidden ? ` The filters hide the ${hidden} picked.` : ""}`;
  if (!cells.length) return;
  byId("smooth").value = view.smooth;
  for (const axis of ["x", "y"]) byId(`log-${axis}`).checked = view.log.includes(axis);
  byId("curves-missing").textContent = missingCurves(cells);
  const curved = cells.filter((cell) => data.cells[cell].curve);
  const series = await Promise.all(curved.map(curveOf));
  if (mine !== drawingNumber) return; // the view went on while this one was loading
  const lines = curved.flatMap((cell, index) => trainingSeries(cell, series[index])).filter(({ x }) => x.length);
  lines.sort((a, b) => a.width - b.width); // validation over training, whichever cell came first
  drawChart("chart-training", {
    series: lines, height: 400, log: view.log, range: lines.length ? lateRange(lines) : null, key: `${view.x} ${view.log} ${cells}`,
    xTitle: view.x === "wall" ? "training seconds" : "tokens of training", yTitle: "loss, nats per token",
    label: `Training and validation loss of ${cells.length} cells`, empty: "No training curve is recorded.",
  }); // prettier-ignore
  const entries = cells.map((cell) => ({ name: cellName(cell), group: data.cells[cell].id, ...strokeOf(cell) }));
  byId("training-legend").replaceChildren(legend(["chart-training", ...data.charts.map(({ probe }) => `chart-${probe}`)], entries));
  part("difference", [cells, data.cells.map(({ curve }) => curve?.points), view.picked], () => differenceParts(series));
  for (const chart of data.charts) {
    const points = cells.map((cell) => lengthSeries(cell, chart)).filter(({ x }) => x.length);
    const lengths = [...new Set(points.flatMap(({ x }) => x))].sort((a, b) => a - b);
    drawChart(`chart-${chart.probe}`, {
      series: points, height: 260, log: lengths.length > 1 ? "x" : "", xSplits: lengths, xText: lengthName, key: String(cells),
      xTitle: "context length, tokens", yTitle: chart.unit, label: `${chart.title}, ${points.length} cells over context length`, empty: "Not measured in these cells.",
    }); // prettier-ignore
  }
  byId("curves-hint").textContent = `Curves of ${cells.length} picked cells. Drag to enlarge, double-click to show all.`;
}
