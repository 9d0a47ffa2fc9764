// Parallel coordinates: a line a row of the table, an axis a factor or measure; a brush on an axis filters the whole page.

const PARALLEL_HEIGHT = 250;

/** The height of a row on an axis, 0 at the bottom and 1 at the top, where the better end is; null without a number. */
function heightOn(axis, row) {
  if (axis.levels) return 1 - axis.levels.indexOf(row.levels[axis.heading][0]) / (axis.levels.length - 1);
  const value = printedNumber(row, axis.heading);
  if (value === null) return null;
  const share = (value - axis.ends[0]) / (axis.ends[1] - axis.ends[0]);
  return axis.better < 0 ? 1 - share : share;
}

function parallelParts() {
  const table = currentTable();
  const { axes } = table;
  if (axes.length < 2) return [plain("Fewer than two factors or measures vary.")];
  const x = (index) => (100 * (index + 0.5)) / axes.length;
  const y = (share) => PARALLEL_HEIGHT * (0.96 - 0.92 * share);
  const summary = (row) => axes.map((axis) => `${axis.name} ${textOn(axis, row)}`).join(" · ");
  const shown = new Set(matching());
  const mixer = table.words.indexOf("Type");
  const picture = make("svg", { viewBox: `0 0 100 ${PARALLEL_HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${shown.size} of ${table.rows.length} configurations match; the numbers are in the table` });
  const rows = [...table.rows].sort((a, b) => shown.has(a) - shown.has(b));
  const tip = make("p", { class: "hint tip-line", role: "status", text: " " });
  for (const row of rows) {
    const heights = axes.map((axis) => heightOn(axis, row));
    const path = heights.map((share, index) => share === null ? "" :
        `${isNumber(heights[index - 1]) ? "L" : "M"}${x(index).toFixed(2)} ${y(share + wobble(axes[index], row)).toFixed(1)}`); // prettier-ignore
    const line = make("path", { d: path.join(""), class: shown.has(row) ? "course" : "course off", "vector-effect": "non-scaling-stroke" });
    if (shown.has(row)) {
      line.style.stroke = mixer < 0 ? lineColor(0) : mixerColor(levelName("Type", row.words[mixer]));
      line.addEventListener("pointerenter", () => (tip.textContent = summary(row)));
      line.addEventListener("click", () => showCell(row.cells[0]));
    }
    picture.append(line);
  }
  if (shown.size > 60) picture.classList.add("dense");
  const box = make("div", { class: "parallel-box" }, picture);
  box.style.height = `${PARALLEL_HEIGHT}px`;
  axes.forEach((axis, index) => box.append(...axisParts(axis, x(index), 100 / axes.length, y, box)));
  return [make("div", { class: "scroll" }, make("div", { class: "parallel" }, make("div", { class: "parallel-names" }, ...axes.map((axis) => make("strong", { text: axis.name }))), box)), tip];
}

/** A small displacement by which lines at the same level fan out; none on the axis of a measure. */
const wobble = (axis, row) => (axis.levels ? ((row.position * 7) % 11) * 0.004 - 0.02 : 0);

const textOn = ({ heading, levels }, row) =>
  levels ? levelName(heading, row.levels[heading][0]) : digits(printedNumber(row, heading));

/** The upright line of an axis, its levels as buttons or its ends as numbers, and the brush of a measure. */
function axisParts(axis, left, width, y, box) {
  const at = (element, share) => {
    const maxWidth = element.classList.contains("tick") ? `${0.96 * width}%` : "";
    Object.assign(element.style, { left: `${left}%`, maxWidth, top: share === null ? "" : `${y(share)}px` });
    return element;
  };
  const rule = at(make("div", { class: axis.levels ? "axis-rule" : "axis-rule brushed", "data-axis": axis.heading, title: axis.levels ? null : "Drag to filter; double-click to show all" }), null);
  if (axis.levels)
    return [rule, ...axis.labels.map((label, index) => {
      const level = axis.levels[index];
      const on = (view.filters[axis.heading] ?? []).includes(level);
      const press = pressable(label, () => filter(axis.heading, level, !on), { class: "tick", "aria-pressed": on, "aria-label": `Only ${axis.name} ${label}` });
      return at(press, 1 - index / Math.max(1, axis.levels.length - 1));
    })]; // prettier-ignore
  const [bottom, top] = axis.better < 0 ? [axis.ends[1], axis.ends[0]] : axis.ends;
  const band = at(make("div", { class: "band", hidden: true }), null);
  const value = (share) => bottom + share * (top - bottom);
  const shareAt = (event) => Math.max(-0.04, Math.min(1.04, (0.96 - (event.clientY - box.getBoundingClientRect().top) / PARALLEL_HEIGHT) / 0.92));
  const show = (one, two) => {
    band.hidden = false;
    const [top, bottom] = [y(Math.max(one, two)), y(Math.min(one, two))];
    Object.assign(band.style, { top: `${top}px`, height: `${bottom - top}px` });
  };
  const range = view.ranges[axis.heading];
  if (range) show(...range.map((end) => Math.max(-0.04, Math.min(1.04, (end - bottom) / (top - bottom)))));
  rule.addEventListener("pointerdown", (event) => {
    const from = shareAt(event);
    rule.setPointerCapture(event.pointerId);
    rule.onpointermove = (move) => show(from, shareAt(move));
    rule.onpointerup = (up) => {
      rule.onpointermove = rule.onpointerup = null;
      const to = shareAt(up);
      if (Math.abs(to - from) > 0.02) setRange(axis.heading, [value(from), value(to)].sort((a, b) => a - b).map((end) => Number(end.toPrecision(5))));
    };
  });
  rule.addEventListener("dblclick", () => setRange(axis.heading, null));
  return [rule, band, ...[[bottom, 0], [top, 1]].map(([end, share]) => at(make("span", { class: "tick", text: digits(Number(end.toPrecision(4))) }), share))];
}

/** Keeps only rows whose number of this heading lies between the ends; null shows all. */
const setRange = (heading, ends) => change({ ranges: withEntry(view.ranges, heading, ends) });

function parallelRows() {
  const { axes } = currentTable();
  const lines = matching().map((row) => [rowName(row), ...axes.map((axis) => textOn(axis, row))]);
  return [["Configuration", ...axes.map(({ name }) => name)], lines];
}
