// What every level does: a table of all effects, read when somebody looks at it.

const FIRST = ["Pairs", "Mean", "Low", "High", "p Holm"]; // numbers of an effect that stand before the others
const effectGrid = new Grid("Effects of levels");
const effects = once(() => inflateJson("effects"));

/** The mean difference with its interval, on a scale that all rows share; the line in the middle is no difference. */
function intervalPicture(mean, low, high, most) {
  const x = (value) => 100 + (95 * value) / most;
  const picture = drawing("svg", { viewBox: "0 0 200 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(
    drawing("line", {
      x1: 100,
      x2: 100,
      y1: 0,
      y2: 24,
      stroke: "currentColor",
      "stroke-opacity": 0.35,
      "vector-effect": "non-scaling-stroke",
    }),
  );
  if (low !== null && high !== null)
    picture.append(
      drawing("line", {
        x1: x(low),
        x2: x(high),
        y1: 12,
        y2: 12,
        stroke: "currentColor",
        "stroke-width": 2,
        "vector-effect": "non-scaling-stroke",
      }),
    );
  if (mean !== null)
    picture.append(drawing("rect", { x: x(mean) - 1.5, y: 6, width: 3, height: 12, fill: "currentColor" }));
  return picture;
}

async function drawEffects() {
  const all = await effects();
  if (view.tab !== "effects") return;
  const measures = [...new Set(all.rows.map((row) => row.words[0]))];
  const measure = measures.includes(view.measure) ? view.measure : measures[0];
  const ofMeasure = all.rows.filter((row) => row.words[0] === measure);
  const subsets = [...new Set(ofMeasure.map((row) => row.words[3]))];
  const rows = ofMeasure.filter(
    (row) => view.within === "every" || row.words[3] === (subsets.includes(view.within) ? view.within : "all"),
  );
  options("effect-measure", measures, measure);
  options("effect-within", [...subsets, ...(subsets.length > 1 ? ["every"] : [])], view.within);
  const [mean, low, high] = ["Mean", "Low", "High"].map((name) => all.numbers.indexOf(name));
  const most = Math.max(
    1e-300,
    ...rows.flatMap((row) => [mean, low, high].map((place) => Math.abs(row.numbers[place][1] ?? 0))),
  );
  const words = all.words
    .map((heading, index) => ({
      heading,
      header: index === 2,
      width: widest(
        heading,
        rows.map((row) => row.words[index]),
        34,
      ),
      cell: (row) => row.words[index],
    }))
    .slice(1);
  const numbers = all.numbers.map((heading, index) => ({
    heading,
    number: true,
    width: widest(
      heading,
      rows.map((row) => row.numbers[index][0]),
    ),
    cell: (row) => effectButton(row, index),
  }));
  const rank = ({ heading }) => (FIRST.includes(heading) ? FIRST.indexOf(heading) : FIRST.length);
  numbers.sort((a, b) => rank(a) - rank(b));
  const picture = {
    heading: "Mean and 95% interval",
    width: 14,
    cell: (row) => intervalPicture(row.numbers[mean][1], row.numbers[low][1], row.numbers[high][1], most),
  };
  effectGrid.show([...words, picture, ...numbers], rows);
  byId("effect-notes").replaceChildren(...all.notes.map((text) => make("p", { text })));
}

function effectButton(row, index) {
  return make("button", {
    type: "button",
    text: row.numbers[index][0],
    on: { click: () => effects().then((all) => showEffect(all, row)) },
  });
}

/** Every pair behind an effect: cells at the level in the first half, at the reference in the second. */
function showEffect(all, row) {
  const [probe, metric, length] = row.about;
  const half = row.cells.length / 2;
  const pairs = row.cells.slice(0, half).map((cell, index) => [cell, row.cells[half + index]]);
  const shown = (cell) => {
    const value = valueOf(cell, { probe, metric, length });
    return [data.cells[cell].slug, digits(value?.[1]), `${value?.[5] ?? "none"}`];
  };
  const numbers = all.numbers.map((heading, index) => [heading, row.numbers[index][0]]);
  openSheet(`${row.words[0]}: ${row.words[1]}, ${row.words[2]}`, [
    facts([["Within", row.words[3]], ...numbers, ["Measures", definitionOf({ probe, metric })]]),
    make("h3", { text: "The pairs" }),
    plainTable(
      ["Cell", "Value", "Attempt", "Held against", "Value", "Attempt"],
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
    make("p", {
      class: "hint",
      text: "What a level does, by pairs of cells that agree on everything else. The whole sweep counts here, whatever is filtered. Press a number for its pairs.",
    }),
    make(
      "div",
      { class: "bar" },
      select("effect-measure", "measure", "Measure"),
      select("effect-within", "within", "Within"),
    ),
    effectGrid.viewport,
    make("div", { class: "notes", id: "effect-notes" }),
  );
}
