// What every level does: a table of all effects, read when somebody looks at it, filtered by measure, axis and stratum.

const FIRST = ["Pairs", "Mean", "Low", "High", "p corr"]; // numbers of an effect that stand before the others
const effectGrid = new Grid("Effect of each factor", { lines: true, rowClass: (row) => (row.mixed ? "mixed" : "") });
const effects = once(() => inflateJson("effects"));
const EVERY = "every";

/** The rows that are asked for, and what there is to ask for; what the address asks for and is not there counts as the first. */
function chosenEffects({ measures, rows }) {
  const headings = measures.map(({ heading }) => heading);
  const heading = headings.includes(view.measure) ? view.measure : headings[mainMeasure(measures)];
  const ofMeasure = rows.filter((row) => row.measure === headings.indexOf(heading));
  const axes = [...new Set(ofMeasure.map((row) => row.axis))];
  const axis = axes.includes(view.axis) ? view.axis : EVERY;
  const strata = [...new Set(ofMeasure.map(stratumOf))];
  const within = view.within === EVERY || strata.includes(view.within) ? view.within : strata[0];
  const chosen = ofMeasure.filter(
    (row) => (axis === EVERY || row.axis === axis) && (within === EVERY || stratumOf(row) === within),
  );
  return { heading, headings, axis, axes, strata, within, chosen };
}

/** The place of the needle at its longest length, else the first. */
function mainMeasure(measures) {
  const main = data.answer.forest.measures[0]?.heading;
  return Math.max(
    0,
    measures.findIndex(({ heading }) => heading === main),
  );
}

const stratumOf = (row) => row.words[2].replace(" ~", "");

async function drawEffects() {
  const all = await effects();
  if (view.tab !== "effects") return;
  byId("effects-all").hidden = !all.rows.length;
  byId("effect-notes").replaceChildren(...all.notes.map((text) => make("p", { text })));
  if (!all.rows.length) return;
  const { heading, headings, axis, axes, strata, within, chosen } = chosenEffects(all);
  options("effect-measure", headings, heading);
  options("effect-axis", [EVERY, ...axes], axis);
  options("effect-within", [...strata, ...(strata.length > 1 ? [EVERY] : [])], within);
  effectGrid.show(effectColumns(all, chosen), chosen);
}

function effectColumns(all, rows) {
  const measure = all.measures[rows[0]?.measure ?? 0];
  const ends = rows.flatMap(({ spot }) => spot).filter((value) => value !== null);
  const ticks = ticksOf(Math.min(0, ...ends), Math.max(0, ...ends));
  const words = all.words.map((heading, index) => ({
    heading,
    header: index === 1,
    width: widest(
      heading,
      rows.map((row) => row.words[index]),
      34,
    ),
    cell: (row) => row.words[index],
  }));
  const numbers = all.numbers.map((heading, index) => ({
    heading,
    number: true,
    width: widest(
      heading,
      rows.map((row) => row.numbers[index]),
      40,
      700, // the sure ones are bold
    ),
    cell: (row) => effectButton(row, index),
  }));
  const rank = ({ heading }) => (FIRST.includes(heading) ? FIRST.indexOf(heading) : FIRST.length);
  numbers.sort((a, b) => rank(a) - rank(b));
  const unit = measure.unit === "%" ? "points" : measure.unit;
  const picture = {
    heading: `${tickText(ticks[0])} to ${tickText(ticks[ticks.length - 1])} ${unit}`,
    title: "Mean and 95% interval; filled where significant after correction",
    width: 18,
    cell: (row) => effectPicture(row, measure, ticks, all.numbers),
  };
  if (!phone.matches) return [...words, picture, ...numbers];
  const named = (heading) => numbers.find((column) => column.heading === heading);
  const short = { heading: "Effect", header: true, width: 16, cell: (row) => `${row.words[0]}: ${row.words[1]}` };
  const first = [short, named("Mean"), { ...picture, width: 10 }];
  return [...first, ...numbers.filter((column) => column.heading !== "Mean"), words[2]];
}

function effectPicture({ spot, sure, numbers }, measure, ticks, headings) {
  const [value, low, high] = spot;
  const kind = !measure.better || value === null ? "plain" : value * measure.better > 0 ? "good" : "bad";
  const told = ["Mean", "Low", "High"].map((name) => numbers[headings.indexOf(name)]);
  return intervalSvg(
    { value, low, high, kind, sure, zero: 0 },
    ticks,
    `${told[0]}, 95% ${told[1]} to ${told[2]}${sure ? ", significant" : ""}`,
  );
}

function effectButton(row, index) {
  return make("button", {
    type: "button",
    class: row.sure ? "sure" : null,
    text: row.numbers[index],
    on: { click: () => effects().then((all) => showEffect(all, row)) },
  });
}

/** Every pair behind an effect: cells at the level in the first half, at the reference in the second. */
function showEffect(all, row) {
  const measure = all.measures[row.measure];
  const cells = all.pairs[row.pairs];
  const half = cells.length / 2;
  const pairs = cells.slice(0, half).map((cell, index) => [cell, cells[half + index]]);
  const shown = (cell) => {
    if (measure.values) return [data.cells[cell].slug, digits(measure.values[cell]), "several"];
    const value = valueOf(cell, measure);
    return [data.cells[cell].slug, digits(value?.[1]), `${value?.[5] ?? "none"}`];
  };
  openSheet(`${measure.heading}: ${row.words[0]}, ${row.words[1]}`, [
    facts([
      ["Within", row.words[2]],
      ...all.numbers.map((heading, index) => [heading, row.numbers[index]]),
      ["Family of tests", row.family],
      ["Missing runs", row.missing],
      ["Measures", definitionOf(measure)],
    ]),
    make("h3", { text: "Pairs" }),
    plainTable(
      ["Cell", "Value", "Attempt", "Reference", "Value", "Attempt"],
      pairs.map(([cell, reference]) => [...shown(cell), ...shown(reference)]),
    ),
  ]);
}

function options(id, values, chosen) {
  byId(id).replaceChildren(
    ...values.map((value) => make("option", { value, text: value, selected: value === chosen })),
  );
}

function buildEffects() {
  const select = (id, name, text) =>
    make("label", {}, text, make("select", { id, on: { change: (event) => change({ [name]: event.target.value }) } }));
  byId("panel-effects").replaceChildren(
    make(
      "div",
      { id: "effects-all" },
      make("p", {
        class: "hint",
        text: "Effect of each level, over pairs of configurations that agree on all other axes. Filled and bold: significant after correction within its family. Filters do not apply to this table. Press a number for its pairs.",
      }),
      make(
        "div",
        { class: "bar" },
        select("effect-measure", "measure", "Measure"),
        select("effect-axis", "axis", "Axis"),
        select("effect-within", "within", "Within"),
      ),
      effectGrid.viewport,
    ),
    make("div", { class: "notes", id: "effect-notes" }),
  );
}
