// Another sweep beside this one, read when somebody looks at it: matched numbers, what the levels do in both, the needle of both.

const beside = once(() => inflateJson("beside"));
const besideGrid = new Grid("Matched numbers of both sweeps", { lines: true });
const JUDGED = ["within", "beyond", "not judged"];

/** On the first page: what came of it in a few lines. */
function besideParts({ lines, why }) {
  const look = make("button", {
    type: "button",
    text: "Show comparison",
    on: { click: () => change({ tab: "beside" }) },
  });
  return [make("ul", {}, ...lines.map((text) => make("li", { text }))), why ? null : look];
}

function buildBeside() {
  if (!data.answer.beside) return;
  parts.delete("beside-all");
  byId("panel-beside").replaceChildren(make("div", { id: "beside-all" }));
}

async function drawBeside() {
  const all = await beside();
  if (view.tab !== "beside") return;
  part("beside-all", all, () => besideAll(all));
  if (!all.why) drawBesideGrid(all);
}

function besideAll(all) {
  if (all.why) return [plain(all.why)];
  const select = (id, name, text) =>
    make("label", {}, text, make("select", { id, on: { change: (event) => change({ [name]: event.target.value }) } }));
  return [
    ...all.refused.map((text) => make("p", { class: "notice", text })),
    make("h2", { text: `Numbers common to ${data.sweep} and ${all.reference}` }),
    besideCounts(all),
    make("div", { class: "squares" }, ...longest(all.measures).map((place) => square(all, all.measures[place], place))),
    legend([], [], {
      spots: [
        ["within the known spread", "within"],
        ["beyond the known spread", "beyond"],
        ["not judged", "open"],
      ],
    }),
    make("h2", { text: "Effect of each factor in both sweeps" }),
    besideEffects(all),
    make("h2", { text: "Needle accuracy over context length in both sweeps" }),
    ...all.needle.flatMap((one) => [make("h3", { text: one.sweep }), ...needleParts(one)]),
    make("h2", { text: "All matched numbers" }),
    make(
      "div",
      { class: "bar" },
      select("beside-measure", "number", "Measure"),
      select("beside-verdict", "verdict", "Verdict"),
    ),
    besideGrid.viewport,
    make("div", { class: "notes" }, ...all.notes.map((text) => make("p", { text }))),
  ];
}

/** The places of the measures that are drawn: of every probe the one at its longest length. */
const longest = (measures) =>
  measures
    .map((_, place) => place)
    .filter((place) => measures[place].matched && measures[place].probe !== measures[place + 1]?.probe);

function besideCounts({ measures }) {
  return plainTable(
    ["Measure", "Matched", "Within", "Beyond", "Expected by chance", "Not judged"],
    measures.map(({ heading, matched, within, beyond, chance, unknown }) => [
      heading,
      ...[matched, within, beyond].map(String),
      within + beyond ? chance : "",
      String(unknown),
    ]),
  );
}

/** Every matched number as a point: there along, here up, on the line where they agree. */
function square(all, measure, place) {
  const rows = all.rows.filter((row) => row.measure === place && row.numbers.every((value) => value !== null));
  const title = measure.unit && measure.unit !== "%" ? `${measure.heading}, ${measure.unit}` : `${measure.heading}, %`;
  const ends = rows.flatMap(({ numbers }) => numbers);
  const ticks = ticksOf(Math.min(...ends), Math.max(...ends));
  const at = placing(ticks);
  const height = 200;
  const plot = drawing("svg", {
    class: "plot",
    height,
    role: "img",
    "aria-label": `${title}: ${rows.length} matched numbers, listed in the table below`,
  });
  const left = drawing("svg", { class: "left", height, "aria-hidden": "true" });
  const below = drawing("svg", { class: "below words", "aria-hidden": "true" });
  for (const tick of ticks) {
    const y = height * (1 - at(tick));
    plot.append(
      drawing("line", { class: "guide", x1: 0, x2: "100%", y1: y, y2: y }),
      drawing("line", { class: "guide", x1: percent(at(tick)), x2: percent(at(tick)), y1: 0, y2: height }),
    );
    for (const [svg, x, down, anchor] of [
      [left, "100%", y + 4, "end"],
      [below, percent(at(tick)), 13, "middle"],
    ]) {
      const text = drawing("text", { x, y: down, "text-anchor": anchor });
      text.textContent = tickText(tick);
      svg.append(text);
    }
  }
  plot.append(drawing("line", { class: "zero", x1: 0, x2: "100%", y1: height, y2: 0 }));
  for (const {
    numbers: [here, there],
    verdict,
  } of rows)
    plot.append(
      drawing("circle", {
        class: `spot ${verdict === "not judged" ? "open" : verdict}`,
        cx: percent(at(there)),
        cy: height * (1 - at(here)),
        r: 3.6,
      }),
    );
  const words = drawing("text", { x: "50%", y: 29, "text-anchor": "middle" });
  words.textContent = all.reference;
  below.append(words);
  return make(
    "figure",
    { class: "lines" },
    make("figcaption", { text: title }),
    make("span", { class: "unit", text: data.sweep }),
    left,
    plot,
    below,
  );
}

// --- what the levels do ---

function besideEffects({ effects, reference }) {
  if (!effects.rows.length) return plain("No effect is available in both sweeps.");
  const boxes = effects.measures.map((measure, place) => {
    const rows = effects.rows.filter(({ here }) => here.measure === place);
    return make(
      "div",
      { class: "forest-of" },
      make("h3", { text: measure.heading }),
      rows.length ? bothForest(rows, measure, reference) : plain("No pairs to compare."),
    );
  });
  return make("div", { class: "forests" }, ...boxes);
}

function bothForest(rows, measure, reference) {
  // the rows of one's own forest, so that both pages tell the same story
  const kept = new Set(forestRows(rows.map(({ here }) => here)));
  const whole = rows.filter(({ here }) => kept.has(here));
  return forestTable(whole, {
    of: ({ here }) => here,
    known: whole.flatMap(({ here, there }) => [here, there].flatMap(({ mean, low, high }) => [mean, low, high])),
    measure,
    lineOf: ({ here, there }, ticks) => bothLine(here, there, measure.better, reference, ticks),
    told: `above: ${data.sweep}; below, grey: ${reference}`,
  });
}

function bothLine(here, there, better, reference, ticks) {
  const picture = (row, kind, sweep) => intervalSvg(effectSpot(row, kind), ticks, `${sweep}: ${effectText(row)}`);
  return make(
    "tr",
    { class: here.where ? "within" : null },
    make(
      "th",
      { scope: "row" },
      here.where || here.level,
      make("small", { text: `${here.pairs} and ${there.pairs} pairs` }),
    ),
    make(
      "td",
      { class: "picture both" },
      picture(here, sign(here, better), data.sweep),
      picture(there, "plain there", reference),
    ),
    make("td", { class: "n" }, make("strong", { text: here.mean_text }), make("small", { text: there.mean_text })),
  );
}

// --- number by number ---

function drawBesideGrid(all) {
  const headings = all.measures.map(({ heading }) => heading);
  const heading = headings.includes(view.number) ? view.number : headings[0];
  const verdict = JUDGED.includes(view.verdict) ? view.verdict : EVERY;
  options("beside-measure", headings, heading);
  options("beside-verdict", [EVERY, ...JUDGED], verdict);
  const rows = all.rows.filter(
    (row) => row.measure === headings.indexOf(heading) && (verdict === EVERY || row.verdict === verdict),
  );
  const column = (heading, text, more = {}) => ({
    heading,
    width: widest(heading, rows.map(text), 26),
    cell: text,
    ...more,
  });
  const words = all.words.map((heading, index) => column(heading, (row) => row.words[index]));
  const open = (text) => (row) =>
    make("button", {
      type: "button",
      text: text(row),
      title: data.cells[row.cells[0]].slug,
      on: { click: () => showCell(row.cells[0]) },
    });
  const number = (heading, index) => {
    const text = (row) => row.texts[index];
    return { ...column(heading, text, { number: true }), cell: index ? text : open(text) };
  };
  const numbers = [number(data.sweep, 0), number(all.reference, 1), number("Difference", 2), number("Limit", 3)];
  const more = [column("Verdict", (row) => row.verdict), column("Cautions", (row) => row.beware.join("; "))];
  const short = { heading: "Configuration", header: true, width: 15, cell: (row) => row.words.join(" ") };
  besideGrid.show(phone.matches ? [short, ...numbers, ...more] : [...words, ...numbers, ...more], rows);
}
