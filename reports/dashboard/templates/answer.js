// The first page: progress, design, cautions and main results.

/** Fills a part of the page again only where its data are others than before, so that what the reader opened stays. */
const parts = new Map();
function part(id, value, content) {
  const now = JSON.stringify(value);
  if (parts.get(id) === now) return;
  parts.set(id, now);
  byId(id).replaceChildren(...[content(value)].flat().filter((one) => one !== null));
}

function buildAnswer() {
  parts.clear();
  const section = (id, title, tag = "section") =>
    make(
      tag,
      { class: `answer part-${id}`, "aria-labelledby": `${id}-title` },
      make("h2", { id: `${id}-title`, text: title }),
      make("div", { id }),
    );
  const care = section("care", "Cautions");
  care.tabIndex = -1;
  byId("panel-answer").replaceChildren(
    section("progress", "Progress"),
    section("asked", "Design"),
    care,
    ...(data.answer.beside ? [section("beside-told", `Comparison with ${data.answer.beside.reference}`)] : []),
    section("best", "Best configurations"),
    ...(data.answer.declared.length ? [section("declared", "Declared contrasts")] : []),
    section("forest", "Effect of each factor"),
    section("needle", "Needle accuracy over context length"),
  );
}

function drawAnswer() {
  const { best, declared, forest, needle } = data.answer;
  part("progress", data.progress, progressParts);
  part("asked", data.asked, askedParts);
  if (data.answer.beside) part("beside-told", data.answer.beside, besideParts);
  part("best", best, bestParts);
  if (declared.length) part("declared", declared, declaredParts);
  part("forest", [forest, view.measure], () => forestParts(forest));
  part("needle", needle, needleParts);
  part("care", [...data.care, ...(data.answer.care ?? [])], careParts);
}

const plain = (text) => make("p", { class: "why", text });

// --- design, progress ---

function askedParts({ axes, facts: told }) {
  const rows = axes.map(({ name, words, levels }) => [
    words.includes(".") ? words : `${words[0].toUpperCase()}${words.slice(1)}`,
    make(
      "span",
      {},
      ...levels.flatMap((level, index) => [index ? " · " : "", make("span", { class: "nowrap", text: level })]),
    ),
  ]);
  return [facts([...rows, ...told])];
}

function progressParts({ counts, running, left, runs }) {
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  const bar = drawing("svg", {
    class: "progress",
    role: "img",
    "aria-label": counts.map(([word, count]) => `${count} ${word}`).join(", "),
  });
  let from = 0;
  for (const [word, count] of counts) {
    bar.append(
      drawing("rect", {
        class: `share ${stateClass(word)}`,
        x: percent(from / total),
        width: percent(count / total),
        y: 0,
        height: "100%",
      }),
    );
    from += count;
  }
  const words = counts.map(([word, count]) => make("li", {}, make("strong", { text: String(count) }), ` ${word}`));
  const eta = left ? `About ${left} left at the current speed.` : runs ? "Remaining time not known yet." : null;
  const rows = running.map(({ slug, doing, left }) => [slug, doing, left ? `${left} left` : ""]);
  return [
    bar,
    make("ul", { class: "counts" }, ...words),
    eta && make("p", { text: eta }),
    rows.length ? plainTable(["Running", "Activity", "Time"], rows) : null,
  ];
}

const stateClass = (word) => `state-${word.replaceAll(" ", "-")}`;

// --- the best ---

function bestParts({ measures, why }) {
  if (why) return [plain(why)];
  return [make("div", { class: "rankings" }, ...measures.map(ranking))];
}

function ranking({ heading, unit, better, rows, of, how }) {
  if (!rows.length) return make("div", { class: "ranking" }, make("h3", { text: heading }), plain(how));
  const ends = rows
    .flatMap(({ value, low, high }) => [value, low ?? value, high ?? value])
    .map((value) => (unit === "%" ? 100 * value : value));
  const scaled = (value) => (value === null ? null : unit === "%" ? 100 * value : value);
  const round = ticksOf(Math.min(...ends), Math.max(...ends), 3);
  // a share ends at 0 and 100, and a single number has no width of its own
  const whole = unit === "%" && (round.at(-1) > 100 || round[0] < 0 || Math.min(...ends) === Math.max(...ends));
  const ticks = whole ? [0, 50, 100] : round;
  const chance = rows.some(({ chance }) => chance !== null && chance !== undefined);
  const lines = rows.map((row) => {
    const open = make("button", {
      type: "button",
      class: "words",
      on: { click: () => showCell(data.placeOf.get(row.cells[0])) },
    });
    row.words.forEach((word, index) => {
      const more = index < row.words.length - 1 ? "," : "";
      open.append(make("span", { class: "nowrap", text: word + more }), more ? " " : "");
    });
    const spot = { value: scaled(row.value), low: scaled(row.low), high: scaled(row.high), kind: "plain" };
    const picture = intervalSvg(spot, ticks, row.interval);
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, open),
      make(
        "td",
        { class: "n" },
        make("strong", { text: row.text }),
        row.interval ? make("small", { text: row.interval }) : "",
      ),
      make("td", { class: "picture" }, picture),
      chance ? make("td", { class: "n chance", text: row.chance === null ? "" : chanceText(row.chance) }) : null,
    );
  });
  const columns = [
    ["Configuration", null],
    [unit === "%" ? `${heading}, %` : heading, "n"],
    ["95% interval", "picture"],
    ...(chance ? [["P(best)", "n chance"]] : []),
  ];
  return make(
    "div",
    { class: "ranking" },
    make("h3", { text: `${heading}: ${better < 0 ? "less" : "more"} is better` }),
    pictureTable(columns, lines, axisSvg(ticks, unit)),
    make("p", {
      class: "hint",
      text: `${rows.length < of ? `First ${rows.length} of ${of} configurations; unlisted` : "Unlisted"} factors are off. ${how}`,
    }),
  );
}

const chanceText = (share) => (share < 0.005 ? "<1%" : share > 0.995 ? ">99%" : `${Math.round(100 * share)}%`);

// --- declared contrasts ---

function declaredParts(rows) {
  return [
    plainTable(["Measure", "Contrast", "Difference", "95% interval", "p, corrected", "Pairs", "Verdict"], rows),
    make("p", {
      class: "hint",
      text: "Declared in the grid before the launch and corrected together; everything else on this page is exploratory.",
    }),
  ];
}

// --- the forest ---

function forestParts({ measures, rows, why }) {
  if (why) return [plain(why)];
  return [
    make(
      "div",
      { class: "forests" },
      ...measures.map((measure, place) =>
        forestOf(
          measure,
          rows.filter((row) => row.measure === place),
        ),
      ),
    ),
  ];
}

/** Rows over the whole sweep, and those inside every mixer (or with every memory) where these do not agree. */
function forestRows(rows) {
  const same = (row) => (all) =>
    !all.where && all.mixed && all.axis === row.axis && all.level === row.level && all.reference === row.reference;
  return rows.filter((row) => !row.where || (!row.where.includes(",") && rows.some(same(row))));
}

function forestOf(measure, all) {
  const rows = forestRows(all);
  return make(
    "div",
    { class: "forest-of" },
    make("h3", { text: measure.heading }),
    rows.length
      ? forestTable(rows, {
          of: (row) => row,
          known: rows.flatMap(({ mean, low, high }) => [mean, low, high]),
          measure,
          lineOf: (row, ticks) => forestLine(row, measure.better, ticks),
        })
      : plain("No pairs to compare."),
  );
}

/** The differences of levels as lines of pictures, the words of an axis and its reference above the rows that share them.
 * `known` are the numbers to be drawn, null among them; `lineOf` makes the line of a row from it and the axis's ticks. */
function forestTable(rows, { of, known, measure, lineOf, told = null }) {
  const { unit, better } = measure;
  const ends = known.filter((value) => value !== null);
  const ticks = ticksOf(Math.min(0, ...ends), Math.max(0, ...ends));
  let family = null;
  const lines = rows.flatMap((row) => {
    const text = `${of(row).axis}, against ${of(row).reference}`;
    const title = make("tr", { class: "family" }, make("th", { colspan: 3, scope: "rowgroup", text }));
    const first = text !== family;
    family = text;
    return first ? [title, lineOf(row, ticks)] : [lineOf(row, ticks)];
  });
  const columns = [
    ["Level", null],
    ["Difference, 95%", "picture"],
    [unit === "%" ? "Points" : unit, "n"],
  ];
  const axis = axisSvg(ticks, `${better < 0 ? "less" : "more"} is better`);
  return pictureTable(columns, lines, axis, { kind: "forest", told });
}

const sign = ({ mean }, better) => (mean === null || !better ? "plain" : mean * better > 0 ? "good" : "bad");

/** An effect in words, for who does not see the picture. */
const effectText = (row) => `${row.mean_text}, 95% ${row.low_text} to ${row.high_text}${row.sure ? ", significant" : ""}`;

/** An effect as `intervalSvg` draws it. */
const effectSpot = ({ mean, low, high, sure }, kind) => ({ value: mean, low, high, kind, sure, zero: 0 });

function forestLine(row, better, ticks) {
  const good = sign(row, better);
  return make(
    "tr",
    { class: [row.where ? "within" : "", row.mixed ? "mixed" : ""].join(" ").trim() || null },
    make("th", { scope: "row" }, row.where || row.level, make("small", { text: `${row.pairs} pairs` })),
    make("td", { class: "picture" }, intervalSvg(effectSpot(row, good), ticks, effectText(row))),
    make(
      "td",
      { class: "n" },
      make("strong", { class: row.sure ? good : null, text: row.mean_text }),
      row.low === null ? "" : make("small", { text: `${row.low_text} to ${row.high_text}` }),
    ),
  );
}

// --- needle ---

function needleParts({ panels, trained, ceiling, note, yardstick, why }) {
  if (why) return [plain(why)];
  const lengths = [
    ...new Set(panels.flatMap(({ lines }) => lines.flatMap(({ points }) => points.map(([length]) => length)))),
  ].sort((a, b) => a - b);
  const names = [...new Set(panels.flatMap(({ lines }) => lines.map(({ name }) => name)))];
  const boxes = panels.map(({ title, lines }) =>
    linesPanel({
      title,
      lines: lines.map((line) => ({ ...line, index: names.indexOf(line.name) })),
      lengths,
      ticks: [0, 25, 50, 75, 100],
      trained,
      level: ceiling ?? null,
      unit: "digits recalled, %",
    }),
  );
  const references = [];
  if (ceiling?.length) references.push([`constant-digit baseline, ${ceilingText(ceiling)}`, "level"]);
  if (trained !== null && lengths.includes(trained))
    references.push([`trained on rows of ${lengthName(trained)}`, "trained"]);
  return [
    make(
      "div",
      {
        class: "panels",
        role: "img",
        "aria-label": "Needle accuracy over context length; the numbers are in the table below",
      },
      ...boxes,
    ),
    legend(
      names.map((name, index) => [name, index]),
      references,
    ),
    make("p", { class: "hint", text: `${note} Needle accuracy, % of digits: ${yardstick}.`.trim() }),
    make("details", {}, make("summary", { text: "These numbers as a table" }), needleTable(panels, lengths)),
  ];
}

function ceilingText(ceiling) {
  const [low, high] = [Math.min(...ceiling.map(([, share]) => share)), Math.max(...ceiling.map(([, share]) => share))];
  return low === high ? `${digits(low)} %` : `${digits(low)} to ${digits(high)} %`;
}

function needleTable(panels, lengths) {
  const told = (points, length) => {
    const point = points.find(([at]) => at === length);
    if (!point) return "";
    const [, value, low, high] = point.map((one, index) => (index && index < 4 && one !== null ? one.toFixed(1) : one));
    return low === null ? value : `${value} [${low}, ${high}]`;
  };
  return plainTable(
    ["Mixer", "Line", ...lengths.map(lengthName)],
    panels.flatMap(({ title, lines }) =>
      lines.map(({ name, points }) => [title, name, ...lengths.map((length) => told(points, length))]),
    ),
  );
}

// --- care ---

function careParts(lines) {
  if (!lines.length) return [plain("The cells differ only in their axes, and none is missing.")];
  return [make("ul", {}, ...lines.map((text) => make("li", { text })))];
}
