// The curves of the picked cells, over training and against context length.

const COLORS = {
  light: ["#0b63b5", "#c44e00", "#007a57", "#a8457f", "#8a6500", "#5b4bb3", "#a3161f", "#5a5d66"],
  dark: ["#62b0f5", "#ff9152", "#42d3a2", "#ee9fcb", "#efc04f", "#b5a6ff", "#ff8f88", "#b9bcc6"],
};
const DASHES = ["solid", "dash", "dot"];
const STROKES = { solid: "", dash: "6 3", dot: "2 2" };

/** The plotting library writes style attributes, which the page's policy refuses; set as properties they are let in. */
function styleAttributesAsProperties() {
  const plain = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function setAttribute(name, value) {
    if (name === "style") this.style.cssText = value;
    else plain.call(this, name, value);
  };
}

const library = once(async () => {
  const source = new TextDecoder().decode(await inflate("library"));
  styleAttributesAsProperties();
  // it adds the style sheet of its maps, which we never draw, unless an element of that id is there
  for (const [, id] of source.matchAll(/getElementById\("([0-9a-f]{64})"\)/g))
    document.head.append(make("style", { id }));
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  return window.Plotly;
});

const curves = new Map();

/** The training and the validation series of a cell: {tokens, wall, loss}, from bytes grouped by their place. */
async function curveOf(cell) {
  const { id, curve } = data.cells[cell];
  if (curves.has(id)) return curves.get(id);
  const bytes = new Uint8Array(await inflate(`curve-${id}`));
  let from = 0;
  const column = (size, count, Kind) => {
    const ordered = new Uint8Array(size * count);
    for (let place = 0; place < size; place++)
      for (let item = 0; item < count; item++) ordered[item * size + place] = bytes[from + place * count + item];
    from += size * count;
    return new Kind(ordered.buffer);
  };
  const found = curve.kept.map((count) => {
    const tokens = column(8, count, Float64Array);
    for (let item = 1; item < count; item++) tokens[item] += tokens[item - 1];
    return { tokens, wall: column(4, count, Float32Array), loss: column(4, count, Float32Array) };
  });
  curves.set(id, found);
  return found;
}

function isDark() {
  return view.theme === "dark" || (view.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
}

/** Colour and dash of the picked cells, the same in every chart. */
function strokeOf(cell) {
  const place = view.picked.indexOf(cell);
  const colors = COLORS[isDark() ? "dark" : "light"];
  return { color: colors[place % colors.length], dash: DASHES[Math.floor(place / colors.length) % DASHES.length] };
}

function swatch(cell) {
  const { color, dash } = strokeOf(cell);
  const picture = drawing("svg", { width: 22, height: 10, "aria-hidden": "true" });
  picture.append(
    drawing("line", {
      x1: 0,
      x2: 22,
      y1: 5,
      y2: 5,
      stroke: color,
      "stroke-width": 3,
      "stroke-dasharray": STROKES[dash],
    }),
  );
  return picture;
}

/** Text as the plotting library prints it as it stands: it reads a little HTML. */
function literal(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function layout(xTitle, yTitle, height, more = {}) {
  const style = getComputedStyle(byId("matches"));
  const grid = isDark() ? "#363944" : "#e3e5ea";
  const axis = (title) => ({
    title: { text: title },
    gridcolor: grid,
    zerolinecolor: grid,
    linecolor: style.color,
    automargin: true,
  });
  return {
    height,
    uirevision: `${xTitle} ${view.picked.map((cell) => data.cells[cell].id)}`, // newer points leave the reader's zoom
    margin: { l: 56, r: 12, t: 12, b: 44 },
    showlegend: false,
    hovermode: "closest",
    dragmode: "zoom",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style.color, family: "system-ui, sans-serif", size: 12 },
    xaxis: { ...axis(xTitle), ...more },
    yaxis: axis(yTitle),
  };
}

const CHART = {
  responsive: true,
  displaylogo: false,
  toImageButtonOptions: { format: "svg" },
  modeBarButtonsToRemove: ["select2d", "lasso2d"],
};

function trainingTraces(cell, [train, val]) {
  const { color, dash } = strokeOf(cell);
  const name = literal(data.cells[cell].slug);
  const x = ({ tokens, wall }) => Array.from(view.x === "wall" ? wall : tokens);
  const y = ({ loss }) => Array.from(loss, (value) => (Number.isNaN(value) ? null : value));
  const traces = [];
  if (train.loss.length)
    traces.push({
      x: x(train),
      y: y(train),
      name: `${name}, train`,
      mode: "lines",
      opacity: 0.55,
      line: { color, dash, width: 1 },
      hovertemplate: "%{y:.4f} at %{x}<extra>%{fullData.name}</extra>",
    });
  if (val.loss.length)
    traces.push({
      x: x(val),
      y: y(val),
      name: `${name}, validation`,
      mode: "lines+markers",
      line: { color, dash, width: 2.4 },
      marker: { color, size: 6 },
      hovertemplate: "%{y:.4f} at %{x}<extra>%{fullData.name}</extra>",
    });
  return traces;
}

/** From the least loss to the most after the first twentieth of training, which would flatten all that follows. */
function lossRange(traces) {
  const end = Math.max(...traces.flatMap(({ x }) => x.slice(-1)));
  const seen = traces.flatMap(({ x, y }) => y.filter((value, index) => value !== null && x[index] > end / 20));
  if (seen.length < 2) return null;
  const [low, high] = seen.reduce(
    ([least, most], value) => [Math.min(least, value), Math.max(most, value)],
    [Infinity, -Infinity],
  );
  const margin = 0.05 * (high - low) || 0.1;
  return [low - margin, high + margin];
}

function lengthPoints(cell, { probe, metric }) {
  const about = data.cells[cell].values.filter(
    ([key]) => data.keys[key].probe === probe && data.keys[key].metric === metric,
  );
  return about
    .map(([key, value, n, low, high, , reason]) => ({ length: data.keys[key].length, value, n, low, high, reason }))
    .sort((a, b) => a.length - b.length);
}

function lengthTrace(cell, chart) {
  const { color, dash } = strokeOf(cell);
  const points = lengthPoints(cell, chart).filter((point) => point.value !== null);
  const scale = chart.percent ? 100 : 1;
  const some = points.some((point) => point.low !== null && point.high !== null);
  const error = some
    ? {
        type: "data",
        symmetric: false,
        array: points.map((p) => scale * ((p.high ?? p.value) - p.value)),
        arrayminus: points.map((p) => scale * (p.value - (p.low ?? p.value))),
        thickness: 1,
        width: 3,
        color,
      }
    : undefined;
  return {
    x: points.map((point) => point.length),
    y: points.map((point) => scale * point.value),
    error_y: error,
    name: literal(data.cells[cell].slug),
    customdata: points.map((point) => lengthName(point.length)),
    mode: "lines+markers",
    line: { color, dash, width: 2 },
    marker: { color, size: 6 },
    hovertemplate: "%{y:.4g} at %{customdata}<extra>%{fullData.name}</extra>",
  };
}

function buildCurves() {
  const boxes = data.charts.map(({ title, probe, hint }) =>
    make(
      "div",
      {},
      make("h3", { text: title }),
      make("div", { class: "chart", id: `chart-${probe}`, role: "img" }),
      hint ? make("p", { class: "hint", text: hint }) : "",
    ),
  );
  byId("panel-curves").replaceChildren(
    make("p", { id: "curves-hint", class: "hint", role: "status" }),
    make(
      "div",
      { id: "curves-all", hidden: true },
      make("h2", { text: "Loss over training" }),
      make(
        "div",
        { class: "bar" },
        radios("Against", "x", { tokens: "tokens", wall: "wall time" }),
        make("p", {
          class: "hint",
          text: "Thin: training loss, where stored. Thick with points: validation loss. The first twentieth of training may lie above the plot; double-click to show all.",
        }),
      ),
      make("div", { class: "chart", id: "chart-training", role: "img" }),
      make("p", { class: "hint", id: "curves-missing" }),
      make("h2", { text: "Numbers over context length" }),
      make("div", { class: "charts" }, ...boxes),
      make("div", { id: "curves-numbers" }),
    ),
    make("div", { id: "all-losses" }),
  );
  buildLosses();
}

function missingCurves() {
  const without = view.picked.filter((cell) => !data.cells[cell].curve).map((cell) => data.cells[cell].slug);
  const thinned = view.picked.filter((cell) =>
    data.cells[cell].curve?.kept.some((count, index) => count < data.cells[cell].curve.all[index]),
  );
  const lines = without.length ? [`No training curve is recorded for ${without.join(", ")}.`] : [];
  if (thinned.length) {
    const { kept, points } = data.cells[thinned[0]].curve;
    lines.push(
      `Thinned, since the sweep is large: ${thinned.length} curves; the first shows ${kept[0] + kept[1]} of ${points} points.`,
    );
  }
  return lines.join(" ");
}

function numbersByLength() {
  const rows = view.picked.flatMap((cell) =>
    data.charts.flatMap((chart) =>
      lengthPoints(cell, chart).map((point) => [
        data.cells[cell].slug,
        chart.title,
        lengthName(point.length),
        point.value === null ? (point.reason ?? "") : digits(point.value),
        point.n === null ? "" : String(point.n),
      ]),
    ),
  );
  return make(
    "details",
    { open: byId("curves-numbers").querySelector("details")?.open },
    make("summary", { text: "These numbers as a table, with the reasons for missing ones" }),
    plainTable(["Cell", "Measure", "Length", "Value", "Samples"], rows),
  );
}

let drawingNumber = 0;

async function drawCurves() {
  const mine = ++drawingNumber;
  byId("curves-all").hidden = !view.picked.length;
  byId("curves-hint").textContent = view.picked.length
    ? "Loading the curves."
    : "All cells. To see the training loss and the numbers over context length of single cells, tick them under Cells.";
  await drawLosses();
  if (!view.picked.length) return;
  byId("curves-missing").textContent = missingCurves();
  byId("curves-numbers").replaceChildren(numbersByLength());
  const cells = [...view.picked];
  const [plotly, ...series] = await Promise.all([
    library(),
    ...cells.filter((cell) => data.cells[cell].curve).map(curveOf),
  ]);
  if (mine !== drawingNumber) return; // the view went on while this one was loading
  const traces = cells
    .filter((cell) => data.cells[cell].curve)
    .flatMap((cell, index) => trainingTraces(cell, series[index]))
    .sort((a, b) => a.line.width - b.line.width); // validation over training, whichever cell came first
  const plan = layout(view.x === "wall" ? "training seconds" : "tokens", "loss, nats/token", 420);
  plan.yaxis.range = lossRange(traces) ?? undefined;
  await chart(plotly, "chart-training", traces, plan, `Training and validation loss of ${cells.length} cells`);
  for (const about of data.charts) await drawLengths(plotly, cells, about);
  byId("curves-hint").textContent = `Curves of ${cells.length} picked cells. Drag to zoom.`;
}

async function drawLengths(plotly, cells, about) {
  const traces = cells.map((cell) => lengthTrace(cell, about)).filter((trace) => trace.x.length);
  const lengths = [...new Set(traces.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  const axis = { type: "log", tickmode: "array", tickvals: lengths, ticktext: lengths.map(lengthName) };
  await chart(
    plotly,
    `chart-${about.probe}`,
    traces,
    layout("context length, tokens", about.unit, 280, axis),
    `${about.title}, ${traces.length} cells over context length`,
  );
}

async function chart(plotly, id, traces, layout, label) {
  const box = byId(id);
  box.setAttribute("aria-label", `${label}; the numbers are in a table below and under each cell's name`);
  await plotly.react(box, traces, layout, CHART);
  box.dataset.traces = traces.length;
}
