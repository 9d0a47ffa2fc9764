// Small pictures of our own: effects with their intervals, and lines over context lengths. Places along a line are in percent
// of the picture's width, so that words and marks keep their size on a phone; colours are classes of the style sheet.

const percent = (share) => `${(100 * share).toFixed(3)}%`;

/** At least three round numbers from below `low` to above `high`. */
function ticksOf(low, high, wanted = 3) {
  const room = high - low || Math.abs(high) || 1;
  const rough = room / wanted;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find((one) => one >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(first + 2, Math.ceil(high / step - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

/** A function from a number to its share of the way between the ends of these ticks. */
function placing(ticks) {
  const [low, high] = [ticks[0], ticks[ticks.length - 1]];
  return (value) => Math.min(1.02, Math.max(-0.02, (value - low) / (high - low)));
}

const tickText = (value) => String(Number(value.toPrecision(6))).replace("-", "\u2212");

// --- an interval in a row ---

/** A point with its interval on the axis of `ticks`: {value, low, high, kind (a class), sure (filled), zero (a line there)}. */
function intervalSvg({ value, low, high, kind = "", sure = true, zero = null }, ticks, label) {
  const at = placing(ticks);
  const picture = drawing("svg", { class: `interval ${kind}`, role: "img", "aria-label": label });
  for (const tick of ticks)
    picture.append(
      drawing("line", { class: "guide", x1: percent(at(tick)), x2: percent(at(tick)), y1: 0, y2: "100%" }),
    );
  if (zero !== null)
    picture.append(drawing("line", { class: "zero", x1: percent(at(zero)), x2: percent(at(zero)), y1: 0, y2: "100%" }));
  if (low !== null && high !== null)
    picture.append(
      drawing("line", { class: "reach", x1: percent(at(low)), x2: percent(at(high)), y1: "50%", y2: "50%" }),
    );
  if (value !== null)
    picture.append(drawing("circle", { class: sure ? "dot" : "dot open", cx: percent(at(value)), cy: "50%", r: 4.5 }));
  return picture;
}

/** The numbers of an axis below a column of pictures. */
function axisSvg(ticks, words) {
  const at = placing(ticks);
  const picture = drawing("svg", { class: "axis", "aria-hidden": "true" });
  // every other number where there are many or long ones, zero among them
  const every = ticks.length > 4 || ticks.map(tickText).join("").length > 12 ? 2 : 1;
  const from = Math.max(0, ticks.indexOf(0)) % every;
  for (const tick of ticks.filter((_, index) => index % every === from)) {
    const text = drawing("text", { x: percent(at(tick)), y: 12, "text-anchor": "middle" });
    text.textContent = tickText(tick);
    picture.append(text);
  }
  const text = drawing("text", { x: "50%", y: 28, "text-anchor": "middle", class: "words" });
  text.textContent = words;
  picture.append(text);
  return picture;
}

/** A table of a picture a row: `columns` are [heading, class], the axis stands below that of the class `picture`, and `told` in
 * the corner beside it. */
function pictureTable(columns, lines, axis, { kind = "", told = null } = {}) {
  const below = columns.map(([, name], index) =>
    name === "picture" ? make("td", { class: name }, axis) : make("td", { text: index ? null : told }),
  );
  const head = columns.map(([text, name]) => make("th", { scope: "col", text, class: name }));
  return make(
    "table",
    { class: ["answers", kind].join(" ").trim() },
    make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...lines),
    make("tfoot", {}, make("tr", {}, ...below)),
  );
}

// --- lines over context lengths ---

const MARKS = ["circle", "square", "diamond", "triangle"];

function markSvg(index, x, y) {
  const kind = MARKS[index % MARKS.length];
  const mark = drawing("svg", { x, y, class: `mark c${index % 8}`, overflow: "visible" });
  const open = index >= MARKS.length ? " open" : "";
  const shapes = {
    circle: ["circle", { r: 4 }],
    square: ["rect", { x: -3.6, y: -3.6, width: 7.2, height: 7.2 }],
    diamond: ["path", { d: "M0-5 5 0 0 5-5 0Z" }],
    triangle: ["path", { d: "M0-4.8 4.6 3.6-4.6 3.6Z" }],
  };
  const [tag, shape] = shapes[kind];
  mark.append(drawing(tag, { ...shape, class: `dot${open}` }));
  return mark;
}

/** One panel: lines [{name, index, points: [[x, y, low, high, cells]]}], ticks of both axes, and reference lines. */
function linesPanel({ title, lines, lengths, ticks, height = 210, trained = null, level = null, unit }) {
  const x = (length) => (lengths.length < 2 ? 0.5 : 0.05 + (0.9 * lengths.indexOf(length)) / (lengths.length - 1));
  const up = placing(ticks);
  const y = (value) => (height - 14) * (1 - up(value)) + 7;
  const plot = drawing("svg", { class: "plot", height, "aria-hidden": "true" });
  const left = drawing("svg", { class: "left", height, "aria-hidden": "true" });
  for (const tick of ticks) {
    plot.append(drawing("line", { class: "guide", x1: 0, x2: "100%", y1: y(tick), y2: y(tick) }));
    const text = drawing("text", { x: "100%", y: y(tick) + 4, "text-anchor": "end" });
    text.textContent = tickText(tick);
    left.append(text);
  }
  if (trained !== null && lengths.includes(trained))
    plot.append(
      drawing("line", { class: "trained", x1: percent(x(trained)), x2: percent(x(trained)), y1: 0, y2: height }),
    );
  if (level) drawLevel(plot, level, x, y);
  lines.forEach(({ index, points }) => drawLine(plot, index, points, x, y, lines.length));
  const below = drawing("svg", { class: "below", "aria-hidden": "true" });
  for (const length of lengths) {
    const text = drawing("text", { x: percent(x(length)), y: 13, "text-anchor": "middle" });
    text.textContent = lengthName(length);
    below.append(text);
  }
  return make(
    "figure",
    { class: "lines" },
    make("figcaption", { text: title }),
    make("span", { class: "unit", text: unit }),
    left,
    plot,
    below,
  );
}

function drawLevel(plot, level, x, y) {
  for (let item = 1; item < level.length; item++)
    plot.append(
      drawing("line", {
        class: "level",
        x1: percent(x(level[item - 1][0])),
        x2: percent(x(level[item][0])),
        y1: y(level[item - 1][1]),
        y2: y(level[item][1]),
      }),
    );
}

function drawLine(plot, index, points, x, y, count) {
  const aside = ((index % count) - (count - 1) / 2) * 0.008; // beside each other, so that no bar hides another
  const at = ([length]) => percent(x(length) + aside);
  const group = drawing("g", { class: `line c${index % 8} d${Math.floor(index / MARKS.length) % 3}` });
  points.slice(1).forEach((point, item) => {
    const before = points[item];
    group.append(
      drawing("line", { class: "stroke", x1: at(before), x2: at(point), y1: y(before[1]), y2: y(point[1]) }),
    );
  });
  for (const point of points) {
    const [, value, low, high] = point;
    if (low !== null && high !== null)
      group.append(drawing("line", { class: "reach", x1: at(point), x2: at(point), y1: y(low), y2: y(high) }));
    group.append(markSvg(index, at(point), y(value)));
  }
  plot.append(group);
}

/** What each line is, the reference lines and the marks: [name, index], [name, class] and [name, class]. */
function legend(lines, references, { spots = [], marked = true } = {}) {
  const entry = (picture, name) => make("li", {}, picture, make("span", { text: name }));
  const strokes = lines.map(([name, index]) => {
    const picture = drawing("svg", { width: 30, height: 14, "aria-hidden": "true" });
    const group = drawing("g", { class: `line c${index % 8} d${Math.floor(index / MARKS.length) % 3}` });
    group.append(drawing("line", { class: "stroke", x1: 0, x2: 30, y1: 7, y2: 7 }));
    if (marked) group.append(markSvg(index, 15, 7));
    picture.append(group);
    return entry(picture, name);
  });
  const levels = references.map(([name, kind]) => {
    const picture = drawing("svg", { width: 30, height: 14, "aria-hidden": "true" });
    picture.append(drawing("line", { class: kind, x1: 0, x2: 30, y1: 7, y2: 7 }));
    return entry(picture, name);
  });
  const marks = spots.map(([name, kind]) => {
    const picture = drawing("svg", { width: 14, height: 14, "aria-hidden": "true" });
    picture.append(drawing("circle", { class: `spot ${kind}`, cx: 7, cy: 7, r: 3.6 }));
    return entry(picture, name);
  });
  return make("ul", { class: "legend" }, ...strokes, ...levels, ...marks);
}
