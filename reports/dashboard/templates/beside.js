// Comparison with another sweep, read when somebody opens it: matched numbers, effects of both, the needle of both.

const beside = once(() => inflateJson("beside"));
const besideGrid = new Grid("Matched numbers of both sweeps", { lines: true });
const VERDICTS = {
  within: ["within the known spread", "--quiet"], beyond: ["beyond the known spread", "--poor"], "not judged": ["not judged", "--line"],
}; // prettier-ignore

/** On the first page: the outcome in a few lines. */
const besideParts = ({ lines, why }) =>
  [bulleted(lines), why ? null : pressable("Show comparison", () => change({ tab: "beside" }))]; // prettier-ignore

async function drawBeside() {
  const all = await beside();
  if (view.tab !== "beside") return;
  part("beside-all", [all, filterKey()], () => besideAll(all));
  if (!all.why) drawBesideGrid(all);
}

const besideLevels = (all, { words }) => words.map((level, index) => levelName(all.words[index], level));

/** The compared numbers of which any cell matches. */
function besideRows(all) {
  const cells = isFiltering() ? matchingCells() : null; // a number that only the other sweep has is of no cell
  return all.rows.filter((row) => !cells || row.cells.some((cell) => cells.has(cell)));
}

function besideAll(all) {
  if (all.why) return [plain(all.why)];
  const rows = besideRows(all);
  const headings = ["Measure", ...all.words.map(headingName), data.sweep, all.reference, "Difference", "Limit", "Verdict", "Cautions"];
  const line = (row) => [all.measures[row.measure].heading, ...besideLevels(all, row), ...row.texts, row.verdict, row.beware.join("; ")];
  const effectHeadings = ["Measure", "Factor", "Levels", data.sweep, all.reference, "Agreement"];
  const squares = all.squares.map((place) => {
    const points = rows.filter((row) => row.measure === place).map((row) =>
        ({ x: row.numbers[1], y: row.numbers[0], group: row.verdict, name: besideLevels(all, row).join(", "), cell: row.cells[0] })); // prettier-ignore
    return square(`square-${place}`, all, titleOf(all.measures[place]), points);
  });
  const effectSquares = all.effects.measures.map((measure, place) => {
    const pairs = all.effects.rows.filter(({ here }) => here.measure === place && !here.where);
    const points = pairs.map(({ here, there }) =>
        ({ x: there.mean, y: here.mean, group: "within", name: `${here.level} against ${here.reference}` })); // prettier-ignore
    return square(`effect-square-${place}`, all, measure.heading, points);
  });
  const key = Object.entries(VERDICTS).map(([group, [name, color]]) => ({ name, group, color: ink(color), dash: [0, 99], points: "fill" }));
  const needles = all.needle.map((one, index) => {
    const overview = index ? { ...data.answer.overview, group: [] } : data.answer.overview;
    return make("div", {}, make("h3", { text: one.sweep }), ...needleParts(one, `needle-${index}`, overview));
  });
  const choices = make("div", { class: "bar" }, select("beside-measure", "number", "Measure"), select("beside-verdict", "verdict"));
  return [
    ...all.refused.map((text) => make("p", { class: "notice", text })), bulleted(data.answer.beside.lines),
    panel("beside-squares", `${data.sweep} against ${all.reference} at a glance`, () => [headings, rows.map(line)], {
      hint: "A point is a matched number; on the line both sweeps agree.",
      content: [make("div", { class: "squares" }, ...squares), legend(all.squares.map((place) => `square-${place}`), key), plainTable(...all.counts)],
    }),
    panel("beside-effects", "Effect of each factor in both sweeps", () => [effectHeadings, all.effects.texts], {
      hint: "A point is an effect; on the line both sweeps agree, beside it their size differs, in the other corners their sign.",
      content: [make("div", { class: "squares" }, ...effectSquares)],
    }),
    panel("beside-needle", "Needle accuracy over context length in both sweeps", null, { content: needles }),
    panel("beside-numbers", "All matched numbers", null, { content: [choices, besideGrid.viewport] }),
    make("div", { class: "notes" }, ...paragraphs(all.notes)),
  ]; // prettier-ignore
}

const titleOf = ({ heading, unit }) => `${heading}, ${unit || "%"}`;

/** Points of both sweeps, {x, y, group, name, cell}, on axes of equal ends, and the line on which both agree. */
function square(id, all, title, points) {
  const known = points.filter(({ x, y }) => isNumber(x) && isNumber(y));
  if (!known.length) return captioned(title, plain("No matched number."));
  const ends = known.flatMap(({ x, y }) => [x, y]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const margin = 0.05 * (high - low) || 0.1;
  const range = [low - margin, high + margin];
  const series = known.map(({ x, y, group, name, cell }) => ({
    name: `${name}: ${all.reference} ${digits(Number(x.toPrecision(4)))}, ${data.sweep}`, group, color: ink(VERDICTS[group][1]),
    spots: true, points: "small", x: [x], y: [y], pick: () => cell !== undefined && showCell(cell),
  })); // prettier-ignore
  const equal = { name: "equal", group: "equal", color: ink("--ink"), width: 1, x: range, y: range };
  const label = `${title}: ${known.length} numbers of both sweeps`;
  const titles = { xTitle: all.reference, yTitle: data.sweep, xText: tickText, label };
  return captioned(title, chartBox(id, { series: [...series, equal], height: 220, range, key: id, ...titles }));
}

function drawBesideGrid(all) {
  const headings = all.measures.map((measure) => measure.heading);
  const heading = headings.includes(view.number) ? view.number : headings[0];
  const verdict = VERDICTS[view.verdict] ? view.verdict : EVERY;
  options("beside-measure", same(headings), heading);
  options("beside-verdict", same([EVERY, ...Object.keys(VERDICTS)]), verdict);
  const shown = (row) => all.measures[row.measure].heading === heading && (verdict === EVERY || row.verdict === verdict);
  const rows = besideRows(all).filter(shown);
  const words = all.words.map((word, index) => gridColumn(headingName(word), rows, (row) => besideLevels(all, row)[index], { most: 26 }));
  const numbers = [data.sweep, all.reference, "Difference", "Limit"].map((name, index) =>
      gridColumn(name, rows, (row) => row.texts[index], { most: 26, number: true })); // prettier-ignore
  const open = (row) => pressable(row.texts[0], () => showCell(row.cells[0]), { title: data.cells[row.cells[0]].slug });
  numbers[0].cell = open;
  const more = [gridColumn("Verdict", rows, (row) => row.verdict), gridColumn("Cautions", rows, (row) => row.beware.join("; "), { most: 26 })];
  const short = { heading: "Configuration", header: true, width: 15, cell: (row) => besideLevels(all, row).join(" ") };
  besideGrid.show([...(phone.matches ? [short] : words), ...numbers, ...more], rows);
}
