// Comparison with another sweep, read when somebody opens it: matched numbers, effects of both, the needle of both.

const beside = once(() => inflateJson("beside"));
const besideGrid = new Grid("Matched numbers of both sweeps", { lines: true });
const VERDICTS = { within: "within the known spread", beyond: "beyond the known spread", "not judged": "not judged" };
const VERDICT_COLORS = { within: "--quiet", beyond: "--poor", "not judged": "--line" };

/** On the first page: the outcome in a few lines. */
function besideParts({ lines, why }) {
  return [make("ul", {}, ...lines.map((text) => make("li", { text }))), why ? null : pressable("Show comparison", () => change({ tab: "beside" }))];
}

function buildBeside() {
  parts.delete("beside-all");
  byId("panel-beside").replaceChildren(make("div", { id: "beside-all" }));
}

async function drawBeside() {
  const all = await beside();
  if (view.tab !== "beside") return;
  part("beside-all", [all, filterKey()], () => besideAll(all));
  if (!all.why) drawBesideGrid(all);
}

/** The compared numbers of which any cell matches. */
function besideRows(all) {
  const cells = isFiltering() ? matchingCells() : null;
  return cells ? all.rows.filter((row) => row.cells.some((cell) => cells.has(cell))) : all.rows;
}

function besideAll(all) {
  if (all.why) return [plain(all.why)];
  const places = all.measures.map((_, place) => place).filter((place) => all.measures[place].matched && all.measures[place].probe !== all.measures[place + 1]?.probe);
  const table = () => [["Measure", ...all.words, data.sweep, all.reference, "Difference", "Limit", "Verdict", "Cautions"], besideRows(all).map((row) => [all.measures[row.measure].heading, ...row.words, ...row.texts, row.verdict, row.beware.join("; ")])];
  const counts = all.measures.map(({ heading, matched, within, beyond, chance, unknown }) => [heading, ...[matched, within, beyond].map(String), within + beyond ? chance : "", String(unknown)]);
  const glance = panel("beside-squares", `${data.sweep} against ${all.reference} at a glance`, table, { kind: "wide", hint: "A point is a matched number; on the line both sweeps agree." });
  const effectPanel = panel("beside-effects", "Effect of each factor in both sweeps", () => effectPairs(all), { kind: "wide", hint: "A point is an effect; on the line both sweeps agree, beside it their size differs, in the other corners their sign." });
  const numberPanel = panel("beside-numbers", "All matched numbers", null, { kind: "wide" });
  const at = (section) => section.querySelector(".panel-body");
  at(glance).append(
    make("div", { class: "squares" }, ...places.map((place) => make("figure", {}, make("figcaption", { text: titleOf(all.measures[place]) }), make("div", { id: `square-${place}` })))),
    legend(places.map((place) => `square-${place}`), Object.entries(VERDICTS).map(([group, name]) => ({ name, group, color: ink(VERDICT_COLORS[group]), dash: [0, 99], points: "fill" }))),
    plainTable(["Measure", "Matched", "Within", "Beyond", "Expected by chance", "Not judged"], counts),
  );
  at(effectPanel).append(make("div", { class: "squares" }, ...all.effects.measures.map((measure, place) => make("figure", {}, make("figcaption", { text: measure.heading }), make("div", { id: `effect-square-${place}` })))));
  at(numberPanel).append(make("div", { class: "bar" }, select("beside-measure", "number", "Measure"), select("beside-verdict", "verdict", "Verdict")), besideGrid.viewport);
  setTimeout(() => {
    for (const place of places) drawSquare(`square-${place}`, all, titleOf(all.measures[place]), Object.keys(VERDICTS).map((group) => [group, besideRows(all).filter((row) => row.measure === place && row.verdict === group).map((row) => [...row.numbers].reverse().concat(row))]));
    all.effects.measures.forEach((measure, place) => drawSquare(`effect-square-${place}`, all, measure.heading, [["within", all.effects.rows.filter(({ here }) => here.measure === place && !here.where).map((pair) => [pair.there.mean, pair.here.mean, pair])]]));
  });
  const needles = all.needle.map((one, index) => make("div", {}, make("h3", { text: one.sweep }), ...needleParts(one, `needle-${index}`, index ? { ...data.answer.overview, group: [] } : data.answer.overview)));
  return [
    ...all.refused.map((text) => make("p", { class: "notice", text })), make("ul", {}, ...data.answer.beside.lines.map((text) => make("li", { text }))), glance, effectPanel,
    make("section", { class: "panel wide" }, make("h2", { text: "Needle accuracy over context length in both sweeps" }), ...needles),
    numberPanel, make("div", { class: "notes" }, ...all.notes.map((text) => make("p", { text }))),
  ]; // prettier-ignore
}

const titleOf = ({ heading, unit }) => (unit && unit !== "%" ? `${heading}, ${unit}` : `${heading}, %`);

/** Points of [group, [[there, here, row]]] on axes of equal ends, and the line on which both agree. */
function drawSquare(id, all, title, groups) {
  if (!byId(id)) return;
  const points = groups.flatMap(([group, rows]) => rows.filter((row) => isNumber(row[0]) && isNumber(row[1])).map((row) => [group, ...row]));
  if (!points.length) return byId(id).replaceChildren(plain("No matched number."));
  const ends = points.flatMap(([, x, y]) => [x, y]);
  const margin = 0.05 * (Math.max(...ends) - Math.min(...ends)) || 0.1;
  const range = [Math.min(...ends) - margin, Math.max(...ends) + margin];
  const nameOf = (row) => (row.words ? row.words.join(", ") : `${row.here.level} against ${row.here.reference}`);
  const series = points.map(([group, x, y, row]) => ({
    name: `${nameOf(row)}: ${all.reference} ${digits(Number(x.toPrecision(4)))}, ${data.sweep}`, group, color: ink(VERDICT_COLORS[group]), spots: true,
    points: "small", x: [x], y: [y], pick: () => row.cells && showCell(row.cells[0]),
  })); // prettier-ignore
  const line = { name: "equal", group: "equal", color: ink("--ink"), width: 1, x: range, y: range };
  drawChart(id, { series: [...series, line], height: 220, range, xTitle: all.reference, yTitle: data.sweep, xText: tickText, label: `${title}: ${points.length} numbers of both sweeps`, key: id });
}

function effectPairs({ effects, reference }) {
  const lines = effects.rows.filter(({ here }) => !here.where).map(({ here, there }) => {
    const agree = here.sure && there.sure ? (here.mean * there.mean > 0 ? "same sign, both significant" : "opposite signs, both significant") : here.sure || there.sure ? "significant in one" : "significant in neither";
    const interval = (row) => (row.low === null ? row.mean_text : `${row.mean_text} (${row.low_text} to ${row.high_text})`);
    return [effects.measures[here.measure].heading, here.axis, `${here.level} against ${here.reference}`, interval(here), interval(there), agree];
  }); // prettier-ignore
  return [["Measure", "Factor", "Levels", data.sweep, reference, "Agreement"], lines];
}

function drawBesideGrid(all) {
  const headings = all.measures.map(({ heading }) => heading);
  const heading = headings.includes(view.number) ? view.number : headings[0];
  const verdict = VERDICTS[view.verdict] ? view.verdict : EVERY;
  options("beside-measure", headings.map((name) => [name, name]), heading);
  options("beside-verdict", [EVERY, ...Object.keys(VERDICTS)].map((name) => [name, name]), verdict);
  const rows = besideRows(all).filter((row) => row.measure === headings.indexOf(heading) && (verdict === EVERY || row.verdict === verdict));
  const column = (heading, text, more = {}) => ({ heading, width: widest(heading, rows.map(text), 26), cell: text, ...more });
  const words = all.words.map((heading, index) => column(headingName(heading), (row) => levelName(heading, row.words[index])));
  const number = (heading, index) => {
    const text = (row) => row.texts[index];
    const open = (row) => pressable(text(row), () => showCell(row.cells[0]), { title: data.cells[row.cells[0]].slug });
    return { ...column(heading, text, { number: true }), cell: index ? text : open };
  };
  const numbers = [number(data.sweep, 0), number(all.reference, 1), number("Difference", 2), number("Limit", 3)];
  const more = [column("Verdict", (row) => row.verdict), column("Cautions", (row) => row.beware.join("; "))];
  const short = { heading: "Configuration", header: true, width: 15, cell: (row) => row.words.map((level, index) => levelName(all.words[index], level)).join(" ") };
  besideGrid.show(phone.matches ? [short, ...numbers, ...more] : [...words, ...numbers, ...more], rows);
}
