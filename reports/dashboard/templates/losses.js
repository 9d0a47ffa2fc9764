// The validation loss of all cells over training, a line a cell, coloured by an axis, with the mean of every level.

const losses = once(() => inflateJson("losses"));
const LOSS_HEIGHT = 320;

function buildLosses() {
  parts.delete("loss-picture"); // what was drawn goes with what it was drawn in
  const select = make("select", { id: "loss-axis", on: { change: (event) => change({ color: event.target.value }) } });
  byId("all-losses").replaceChildren(
    make("h2", { text: "Validation loss of all cells" }),
    make("div", { class: "bar", id: "loss-bar" }, make("label", {}, "Coloured by", select)),
    make("div", { id: "loss-picture" }),
  );
}

async function drawLosses() {
  const all = await losses();
  byId("loss-bar").hidden = !all.lines.length || !data.asked.axes.length;
  if (!all.lines.length) {
    part("loss-picture", all.lines, () => plain("No attempt recorded a validation loss during training."));
    return;
  }
  const axes = data.asked.axes;
  const axis = axes.find(({ name }) => name === view.color) ?? axes[0] ?? null;
  options(
    "loss-axis",
    axes.map(({ words }) => words),
    axis?.words,
  );
  for (const [place, option] of [...byId("loss-axis").options].entries()) option.value = axes[place].name;
  const levels = levelsOf(axis);
  part("loss-picture", [all, axis, data.cells.map((cell) => cell.slug)], () => lossParts(all, levels));
}

/** [level as figures name it, its cells]: one group of all where no axis varies. */
function levelsOf(axis) {
  if (!axis) return [["all cells", new Set(data.cells.keys())]];
  const found = new Map();
  data.cells.forEach((cell, place) => {
    const level = cell.axes[axis.name] ?? "-";
    if (!found.has(level)) found.set(level, new Set());
    found.get(level).add(place);
  });
  return [...found.values()].map((cells, index) => [axis.levels[index] ?? [...found.keys()][index], cells]);
}

/** The mean over lines that were read at the same tokens, and none where they were not. */
function meanLine(lines) {
  const grids = new Set(lines.map(([, grid]) => grid));
  if (lines.length < 2 || grids.size > 1) return null;
  const [[, grid, first]] = lines;
  const at = (index) => lines.map(([, , loss]) => loss[index]);
  const mean = (values) =>
    values.includes(null) ? null : values.reduce((sum, value) => sum + value, 0) / values.length;
  return [null, grid, first.map((_, index) => mean(at(index)))];
}

function lossParts(all, levels) {
  const groups = levels.map(([name, cells], index) => {
    const lines = all.lines.filter(([cell]) => cells.has(cell));
    return { name, index, lines, mean: meanLine(lines) };
  });
  const spans = all.lines.map(([, grid, loss]) => all.grids[grid].map((tokens, index) => [tokens, loss[index]])).flat();
  const end = Math.max(...spans.map(([tokens]) => tokens));
  const late = spans.filter(([tokens, loss]) => loss !== null && tokens >= end / 10).map(([, loss]) => loss);
  const seen = late.length ? late : spans.map(([, loss]) => loss).filter((loss) => loss !== null);
  const ticks = [
    ticksOf(0, end, 4).filter((tick) => tick <= 1.02 * end),
    ticksOf(Math.min(...seen), Math.max(...seen), 4),
  ];
  const cut = spans.some(([, loss]) => loss !== null && loss > ticks[1][ticks[1].length - 1]);
  const single = all.lines.length === 1 ? "The line is" : "Thin lines are";
  const means = groups.some(({ mean }) => mean) ? ", thick ones means over the cells of a level" : "";
  return [
    lossPicture(all, groups, ticks, end),
    legend(
      groups.filter(({ lines }) => lines.length).map(({ name, index }) => [name, index]),
      [],
      { marked: false },
    ),
    make("p", {
      class: "hint",
      text: `${single} cells${means}${cut ? "; the beginning of training lies above the plot" : ""}. Hover over a line to see its cell.`,
    }),
    make("details", {}, make("summary", { text: "Final validation losses as a table" }), lastTable(groups)),
  ];
}

function lossPicture(all, groups, [across, up], end) {
  const [x, y] = [placing([0, Math.max(end, ...across)]), placing(up)];
  const plot = drawing("svg", {
    class: `plot losses ${all.lines.length > 300 ? "many" : ""}`,
    height: LOSS_HEIGHT,
    role: "img",
    "aria-label": `Validation loss over training tokens of ${all.lines.length} cells; final losses are in the table below`,
  });
  // lines are drawn in thousandths of the width: percent is no unit of a path
  const inner = drawing("svg", {
    viewBox: `0 0 1000 ${LOSS_HEIGHT}`,
    preserveAspectRatio: "none",
    width: "100%",
    height: LOSS_HEIGHT,
  });
  const [left, below] = ["left", "below words"].map((kind) =>
    drawing("svg", { class: kind, height: LOSS_HEIGHT, "aria-hidden": "true" }),
  );
  below.setAttribute("height", 34);
  const write = (svg, text, at) => {
    const node = drawing("text", at);
    node.textContent = text;
    svg.append(node);
  };
  for (const tick of up) {
    const at = LOSS_HEIGHT * (1 - y(tick));
    plot.append(drawing("line", { class: "guide", x1: 0, x2: "100%", y1: at, y2: at }));
    write(left, tickText(tick), { x: "100%", y: at + 4, "text-anchor": "end" });
  }
  for (const tick of across) {
    plot.append(
      drawing("line", { class: "guide", x1: percent(x(tick)), x2: percent(x(tick)), y1: 0, y2: LOSS_HEIGHT }),
    );
    write(below, tokensText(tick), {
      x: percent(x(tick)),
      y: 13,
      "text-anchor": tick > 0.96 * end ? "end" : "middle",
    });
  }
  write(below, "tokens of training", { x: "50%", y: 29, "text-anchor": "middle" });
  const [low, high] = [up[0], up.at(-1)];
  const lineOf = ([cell, grid, loss], kind, name) => {
    const parts = [];
    let pen = "M";
    loss.forEach((value, index) => {
      if (value === null) return (pen = "M"); // not finite: the line breaks
      const height = LOSS_HEIGHT * (1 - (value - low) / (high - low));
      parts.push(`${pen}${(1000 * x(all.grids[grid][index])).toFixed(1)} ${height.toFixed(1)}`);
      pen = "L";
    });
    const path = drawing("path", { class: `course ${kind}`, d: parts.join(""), "vector-effect": "non-scaling-stroke" });
    const title = drawing("title", {});
    title.textContent =
      cell === null
        ? `mean of ${name}`
        : `${data.cells[cell].slug}, ${digits(loss.findLast((value) => value !== null))} at last`;
    path.append(title);
    return path;
  };
  for (const { index, lines, name } of groups)
    for (const line of lines) inner.append(lineOf(line, `c${index % 8}`, name));
  for (const { index, mean, name } of groups)
    if (mean) inner.append(lineOf(mean, `thick c${index % 8} d${Math.floor(index / MARKS.length) % 3}`, name));
  plot.append(inner);
  return make(
    "figure",
    { class: "lines" },
    make("span", { class: "unit", text: "validation loss, nats/token" }),
    left,
    plot,
    below,
  );
}

function tokensText(value) {
  for (const [unit, size] of [
    ["B", 1e9],
    ["M", 1e6],
    ["K", 1e3],
  ])
    if (value >= size) return tickText(value / size) + unit;
  return tickText(value);
}

function lastTable(groups) {
  const last = ([, , loss]) => loss.findLast((value) => value !== null);
  const rows = groups
    .map(({ name, lines }) => [name, lines.map(last).filter((value) => value !== undefined)])
    .filter(([, values]) => values.length)
    .map(([name, values]) => {
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
      return [name, values.length, mean.toFixed(3), Math.min(...values).toFixed(3), Math.max(...values).toFixed(3)].map(
        String,
      );
    });
  return plainTable(["Level", "Cells", "Mean final loss", "Lowest", "Highest"], rows);
}
