// Charts: lines and points by uPlot, a legend of buttons, the nearest line in words, and every panel's numbers as table and CSV.

const charts = new Map(); // id of the box: {plot, spec, zoomed, hidden}
const DASHES = [[], [7, 4], [2, 3]];

/** A colour of the style sheet by the name of its property, as the canvas takes it. */
function ink(name) {
  byId("ink").style.color = `var(${name})`;
  return getComputedStyle(byId("ink")).color;
}

const faded = (color, share) => `color-mix(in srgb, ${color} ${Math.round(100 * share)}%, transparent)`;
const isDark = () => view.theme === "dark" || (view.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);

/** The colour and the dash of the n-th of several lines. */
const lineColor = (index) => ink(`--c${index % 8}`);
const lineLook = (index) => ({ color: lineColor(index), dash: DASHES[Math.floor(index / 8) % 3] });

/** The colour of a mixer by its label: the same in every panel, and in the figures. */
function mixerColor(label) {
  const { light, dark } = data.answer.overview.hues[label] ?? {};
  return (isDark() ? dark : light) ?? lineColor(Math.max(0, Object.keys(data.answer.overview.hues).indexOf(label)));
}

/** Numbers in few digits for ticks: 0.25, 3.5, 16K, 1M (thousands unless `exact` powers of two). */
const tickText = (value) => String(Number(value.toPrecision(6))).replace("-", "\u2212");
function countText(value) {
  const [unit, size] = [["B", 1e9], ["M", 1e6], ["K", 1e3]].find(([, least]) => value >= least) ?? ["", 1];
  return tickText(value / size) + unit;
}

/** Draws lines into a box, in place of what was there; a reader's zoom and the lines he hid stay.

`spec`: series ({name, x, y, color, dash, width, points ("fill", "open", none), low, high, group, pick}), label, xTitle, yTitle,
height, xText, yText, xSplits, log ("x", "y" or both in one text), range ([low, high] of y), xRule (a vertical line), key. */
function drawChart(id, spec) {
  const box = byId(id);
  const old = charts.get(id);
  const chart = { spec, plot: null, zoomed: false, hidden: old?.hidden ?? new Set(), focus: null };
  const zoom = old?.zoomed && old.spec.key === spec.key ? old.plot.scales : null;
  old?.plot.destroy();
  old?.watch.disconnect();
  charts.delete(id);
  const series = spec.series.filter(({ x }) => x.length);
  box.dataset.traces = series.length;
  if (!series.length) return box.replaceChildren(plain(spec.empty ?? "Nothing to draw."));
  charts.set(id, chart);
  box.replaceChildren();
  chart.series = series;
  box.classList.add("chart");
  for (const [name, value] of Object.entries({ role: "group", "aria-roledescription": "chart", tabindex: 0 })) box.setAttribute(name, value);
  box.setAttribute("aria-label", `${spec.label}. Arrow keys read its points; the numbers are in the table below.`);
  const [grid, quiet] = ["--line", "--quiet"].map(ink);
  const axis = (title, values, size) => ({
    label: title, labelSize: 18, labelFont: "12px system-ui", font: "11px system-ui", stroke: quiet, size, gap: 3,
    grid: { stroke: grid, width: 1 }, ticks: { show: false }, values: (plot, splits) => splits.map((value) => (value === null ? "" : values(value))),
  }); // prettier-ignore
  const log = spec.log ?? "";
  const distr = (name) => (log.includes(name) ? { distr: 3 } : {});
  const range = (plot, low, high) => (chart.zoomed ? [low, high] : spec.range);
  const xRange = (plot, low, high) => (chart.zoomed ? [low, high] : [spec.xSplits[0] / 1.08, spec.xSplits.at(-1) * 1.08]);
  const options = {
    width: Math.max(160, box.clientWidth), height: spec.height, padding: [8, 12, 0, 0], legend: { show: false },
    focus: { alpha: series.length > 40 ? 0.35 : 0.45 },
    cursor: { focus: { prox: 28 }, hover: { skip: [undefined, null] }, drag: { x: true, y: true, uni: 24 }, points: { size: 8 }, y: false },
    scales: {
      x: { time: false, ...(spec.xSplits && log.includes("x") ? { range: xRange } : {}), ...distr("x") },
      y: { ...(spec.range && !log.includes("y") ? { range } : {}), ...distr("y") },
    },
    axes: [
      { ...axis(spec.xTitle, spec.xText ?? countText, 26), ...(spec.xSplits ? { splits: () => spec.xSplits, filter: (plot, splits) => splits } : {}) },
      axis(spec.yTitle, spec.yText ?? tickText, 44),
    ],
    series: [{}, ...series.map((one) => ({
      label: one.name, stroke: one.color, width: one.width ?? 1.6, dash: one.dash, show: !chart.hidden.has(one.group),
      paths: one.spots ? () => null : undefined, points: { show: false },
    }))], // prettier-ignore
    hooks: {
      draw: [(plot) => drawBars(plot, series, spec, quiet)],
      setSeries: [(plot, index) => index !== null && (chart.focus = index)],
      setCursor: [(plot) => showTip(chart, box)],
      setSelect: [(plot) => (chart.zoomed = plot.select.width > 0 || plot.select.height > 0)],
    },
  };
  chart.plot = new uPlot(options, uPlot.join(series.map(({ x, y }) => [x, y])), box);
  chart.tip = make("div", { class: "tip", hidden: true });
  chart.plot.over.append(chart.tip);
  chart.plot.over.addEventListener("dblclick", () => (chart.zoomed = false));
  chart.plot.over.addEventListener("click", () => !chart.plot.select.width && chart.near && series[chart.near - 1]?.pick?.());
  if (zoom) for (const name of ["x", "y"]) chart.plot.setScale(name, { min: zoom[name].min, max: zoom[name].max });
  chart.zoomed = Boolean(zoom);
  box.onkeydown = (event) => readPoints(chart, event);
  chart.watch = new ResizeObserver(() => box.clientWidth > 0 && Math.abs(box.clientWidth - chart.plot.width) > 1 && chart.plot.setSize({ width: box.clientWidth, height: spec.height }));
  chart.watch.observe(box);
}

/** A box for a chart, which is drawn as soon as the box stands in the page. */
function chartBox(id, spec) {
  setTimeout(() => byId(id) && drawChart(id, spec));
  return make("div", { id });
}

const captioned = (title, box) => make("figure", {}, make("figcaption", { text: title }), box);

/** The outline of a mark around a point: a circle, a square or a triangle. */
function outline(kind, x, y, size) {
  const path = new Path2D();
  if (kind === 1) path.rect(x - 0.88 * size, y - 0.88 * size, 1.76 * size, 1.76 * size);
  else if (kind === 2) return new Path2D(`M${x} ${y - 1.2 * size}l${1.05 * size} ${2 * size}h${-2.1 * size}z`);
  else path.arc(x, y, size, 0, 7);
  return path;
}

/** What uPlot does not draw: intervals as vertical bars, marks, and the vertical line of the training length. */
function drawBars(plot, series, { xRule }, quiet) {
  const { ctx, bbox } = plot;
  const [paper, scale] = [ink("--paper"), devicePixelRatio];
  const line = (x, low, high) => ctx.stroke(new Path2D(`M${x} ${low}L${x} ${high}`));
  const at = (value, name) => plot.valToPos(value, name, true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - 6, bbox.top - 6, bbox.width + 12, bbox.height + 12);
  ctx.clip();
  ctx.setLineDash([]);
  series.forEach(({ x, y, low, high, color, points, mark = 0 }, index) => {
    if (!plot.series[index + 1].show || !(low || points)) return;
    ctx.globalAlpha = plot.series[index + 1].alpha ?? 1;
    ctx.strokeStyle = color;
    x.forEach((value, item) => {
      ctx.lineWidth = 1.2 * scale;
      if (isNumber(low?.[item])) line(at(value, "x"), at(low[item], "y"), at(high[item], "y"));
      if (!points || !isNumber(y[item])) return;
      const shape = outline(mark, at(value, "x"), at(y[item], "y"), (points === "small" ? 2.4 : 3.4) * scale);
      ctx.fillStyle = points === "open" ? paper : color;
      ctx.fill(shape);
      ctx.lineWidth = 1.5 * scale;
      ctx.stroke(shape);
    });
  });
  ctx.globalAlpha = 1;
  if (isNumber(xRule)) {
    ctx.strokeStyle = quiet;
    ctx.setLineDash([6 * scale, 4 * scale]);
    line(at(xRule, "x"), bbox.top, bbox.top + bbox.height);
  }
  ctx.restore();
}

/** What the point of a line nearest to the cursor is. */
function pointText({ spec, plot, series }, index, item) {
  const x = plot.data[0][item];
  const { name, low, high, x: own } = series[index - 1];
  const at = own.indexOf(x);
  const text = spec.yText ?? ((value) => String(Number(value.toPrecision(4))));
  const interval = low && isNumber(low[at]) ? ` (95% interval ${text(low[at])} to ${text(high[at])})` : "";
  return `${name}: ${text(plot.data[index][item])}${interval} at ${(spec.xText ?? countText)(x)}`;
}

function showTip(chart, box) {
  const { plot, tip, focus } = chart;
  const { left, top } = plot.cursor;
  const item = focus ? plot.cursor.idxs?.[focus] : null;
  const near = left >= 0 && isNumber(item) && isNumber(plot.data[focus][item]) && plot.series[focus].show;
  chart.near = near ? focus : null;
  if (!tip) return;
  tip.hidden = !near;
  if (!near) return;
  tip.textContent = pointText(chart, focus, item);
  const room = plot.over.clientWidth;
  const [x, y] = [Math.max(0, Math.min(left + 12, room - tip.offsetWidth)), Math.max(0, top - tip.offsetHeight - 10)];
  Object.assign(tip.style, { left: `${x}px`, top: `${y}px` });
}

/** Left and right go from point to point, up and down from line to line; each is read aloud. Escape shows all again. */
function readPoints(chart, event) {
  const { plot, series } = chart;
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (event.key === "Escape") return (chart.zoomed = false), plot.setData(plot.data, true);
  if (!step) return;
  event.preventDefault();
  chart.line = ((chart.line ?? 0) + step[0] + series.length) % series.length;
  const { x, y } = series[chart.line];
  chart.point = Math.max(0, Math.min(x.length - 1, (chart.point ?? -1) + step[1]));
  const item = plot.data[0].indexOf(x[chart.point]);
  chart.focus = chart.line + 1;
  if (isNumber(y[chart.point])) {
    plot.setCursor({ left: plot.valToPos(x[chart.point], "x"), top: plot.valToPos(y[chart.point], "y") });
    say(pointText(chart, chart.line + 1, item));
  }
}

/** The stroke of a line as a small picture. */
const legendLine = ({ color, dash = [] }) =>
  make("svg", { width: 26, height: 12, "aria-hidden": "true" },
    make("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: color, "stroke-width": 2.4, "stroke-dasharray": dash.join(" ") })); // prettier-ignore

/** Buttons that hide and show the lines of a group in the charts of these ids: [{name, group, color, dash, points}]. */
function legend(ids, entries) {
  const button = ({ name, group, color, dash, points, mark }) => {
    const stroke = legendLine({ color, dash });
    const look = { stroke: color, "stroke-width": 1.6, fill: points === "open" ? ink("--paper") : color };
    const shape = mark ? ["rect", { x: 10, y: 3, width: 6, height: 6 }] : ["circle", { cx: 13, cy: 6, r: 3.4 }];
    if (points) stroke.append(make(shape[0], { ...shape[1], ...look }));
    const pressed = String(ids.every((id) => !charts.get(id)?.hidden.has(group)));
    const press = make("button", { type: "button", "aria-pressed": pressed, title: "Hide or show" }, stroke, make("span", { text: name }));
    press.addEventListener("click", () => {
      const hide = press.getAttribute("aria-pressed") === "true";
      press.setAttribute("aria-pressed", !hide);
      for (const chart of ids.map((id) => charts.get(id)).filter(Boolean)) {
        chart.hidden[hide ? "add" : "delete"](group);
        chart.series.forEach((one, index) => one.group === group && chart.plot.setSeries(index + 1, { show: !hide }));
      }
    });
    return make("li", {}, press);
  };
  return make("ul", { class: "legend", "aria-label": "Lines; press one to hide or show it" }, ...entries.map(button));
}

// --- a panel with its numbers ---

/** A part of the page with a heading, its content, and its numbers as CSV and as a table (`rows`: [headings, lines of texts]). */
function panel(id, title, rows, { hint = null, more = null, kind = "", content = [] } = {}) {
  const fill = async () => table.replaceChildren(table.firstChild, plainTable(...textRows(await rows())));
  const table = make("details", { class: "numbers", on: { toggle: () => table.open && fill() } }, make("summary", { text: "Table" }));
  const download = pressable("CSV", async () => saveCsv(`${data.sweep}-${id}.csv`, await rows()), { class: "small", "aria-label": `CSV of ${title}` });
  return make("section", { class: `panel ${kind}`, "aria-labelledby": `${id}-title` },
    make("div", { class: "panel-head" }, make("h2", { id: `${id}-title`, text: title }), more, rows ? download : null),
    hint ? make("p", { class: "hint", id: `${id}-hint`, text: hint }) : null,
    make("div", { id, class: "panel-body" }, ...content),
    rows ? table : null); // prettier-ignore
}

const textRows = ([headings, lines]) => [headings, lines.map((line) => line.map((value) => String(value ?? "")))];
const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

function saveCsv(name, table) {
  const [headings, lines] = textRows(table);
  const text = [headings, ...lines].map((line) => `${line.map(quoted).join(",")}\r\n`).join("");
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  make("a", { href: address, download: name.replace(/[^\w.-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

const plain = (text) => make("p", { class: "why", text });

/** Fills a part of the page again only where its data are others than before, so that what the reader opened stays. */
const parts = new Map();
function isNew(id, value) {
  const now = JSON.stringify(value);
  return parts.get(id) !== now && parts.set(id, now);
}

function part(id, value, content) {
  if (!isNew(id, [value, isDark()])) return;
  const made = content(value);
  if (made) byId(id).replaceChildren(...[made].flat().filter((one) => one !== null));
}
