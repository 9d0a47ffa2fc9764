// All effects: a table of every level, measure and stratum, read when somebody opens it.

const effectGrid = new Grid("Effect of each factor", { lines: true, rowClass: (row) => (row.mixed ? "mixed" : "") });
const effects = once(() => inflateJson("effects"));
const EVERY = "every";
const same = (names) => names.map((name) => [name, name]); // choices whose text is their value
const stratumOf = (row) => row.words[2].replace(" ~", "");

/** Draws the rows that the view asks for, and the choices there are; one of the address that does not exist counts as the first. */
async function drawEffects() {
  const all = await effects();
  if (view.tab !== "effects") return;
  byId("effects-all").hidden = !all.rows.length;
  byId("effect-notes").replaceChildren(...paragraphs(all.notes));
  if (!all.rows.length) return;
  const headings = all.measures.map(({ heading }) => heading);
  const main = Math.max(0, headings.indexOf(data.answer.forest.measures[0]?.heading));
  const heading = headings.includes(view.measure) ? view.measure : headings[main];
  const ofMeasure = all.rows.filter((row) => row.measure === headings.indexOf(heading));
  const axes = [...new Set(ofMeasure.map((row) => row.axis))];
  const axis = axes.includes(view.axis) ? view.axis : EVERY;
  const strata = [...new Set(ofMeasure.map(stratumOf))];
  const within = view.within === EVERY || strata.includes(view.within) ? view.within : strata[0];
  const chosen = ofMeasure.filter((row) => (axis === EVERY || row.axis === axis) && (within === EVERY || stratumOf(row) === within));
  const axisName = (name) => [name, data.answer.overview.axes.find((one) => one.name === name)?.words ?? name];
  options("effect-measure", same(headings), heading);
  options("effect-axis", [[EVERY, EVERY], ...axes.map(axisName)], axis);
  options("effect-within", same([...strata, ...(strata.length > 1 ? [EVERY] : [])]), within);
  const cells = isFiltering() ? matchingCells() : null;
  effectGrid.show(effectColumns(all, chosen, cells), cells ? chosen.filter((row) => pairsOf(all, row, cells).length) : chosen);
}

/** The pairs of cells of an effect, [level, reference] each; with `cells`, those of which both match. */
function pairsOf(all, row, cells = null) {
  const indices = all.pairs[row.pairs];
  const half = indices.length / 2;
  const pairs = indices.slice(0, half).map((cell, index) => [cell, indices[half + index]]);
  return cells ? pairs.filter((pair) => pair.every((cell) => cells.has(cell))) : pairs;
}

function effectColumns(all, rows, cells) {
  const button = (index) => (row) => pressable(row.numbers[index], () => showEffect(all, row), { class: row.sure ? "sure" : null });
  const words = all.words.map((heading, index) => gridColumn(heading, rows, (row) => row.words[index], { most: 34, header: index === 1 }));
  const numbers = all.numbers.map((heading, index) => ({
    ...gridColumn(heading, rows, (row) => row.numbers[index], { weight: 700, number: true }), cell: button(index),
  })); // prettier-ignore
  const left = cells ? [{ heading: "Pairs that match", number: true, width: 10, cell: (row) => String(pairsOf(all, row, cells).length) }] : [];
  if (!phone.matches) return [...words, ...left, ...numbers];
  const short = { heading: "Effect", header: true, width: 16, cell: (row) => `${row.words[0]}: ${row.words[1]}` };
  const mean = numbers.find(({ heading }) => heading === "Mean");
  return [short, mean, ...left, ...numbers.filter((column) => column !== mean), words[2]];
}

/** Every pair behind an effect: the cell at the level, then that at the reference. */
function showEffect(all, row) {
  const measure = all.measures[row.measure];
  const shown = (cell) => {
    const [number, attempt] = measure.values ? [measure.values[cell], "several"] : [1, 5].map((index) => valueOf(cell, measure)?.[index]);
    return [data.cells[cell].slug, digits(number, measure.percent ? 100 : 1), `${attempt ?? "none"}`];
  };
  openSheet(`${measure.heading}: ${row.words[0]}, ${row.words[1]}`, [
    facts([
      ["Within", row.words[2]], ...all.numbers.map((heading, index) => [heading, row.numbers[index]]),
      ["Family of tests", row.family], ["Missing runs", row.missing], ["Measures", measure.definition],
    ]),
    make("h3", { text: "Pairs" }),
    plainTable(["Cell", `Value, ${measure.unit}`, "Attempt", "Reference", `Value, ${measure.unit}`, "Attempt"], pairsOf(all, row).map((pair) => pair.flatMap(shown))),
  ]); // prettier-ignore
}

/** Fills a list of choices: [value, text] each. */
function options(id, values, chosen) {
  byId(id).replaceChildren(...values.map(([value, text]) => make("option", { value, text, selected: value === chosen })));
}

const effectRows = () => effects().then(({ measures, words, numbers, rows }) =>
    [["Measure", ...words, ...numbers], rows.map((row) => [measures[row.measure].heading, ...row.words, ...row.numbers])]); // prettier-ignore

/** A labelled list of choices for an entry of the view. */
const select = (id, name, text = capitalized(name)) =>
  make("label", {}, text, make("select", { id, on: { change: (event) => change({ [name]: event.target.value }) } }));

function buildEffects() {
  byId("panel-effects").replaceChildren(
    panel("effects-all", "All effects", effectRows, {
      hint: "Effect of each level, over pairs of configurations that agree on all other factors. Bold: significant after correction within its family. Press a number for its pairs.",
      content: [make("div", { class: "bar" }, ...["measure", "axis", "within"].map((name) => select(`effect-${name}`, name, name === "axis" ? "Factor" : undefined))), effectGrid.viewport],
    }),
    make("div", { class: "notes", id: "effect-notes" }),
  );
}
