// A table of any length.

const ROW_HEIGHT = 32; // pixels of a table row, its border included
const NARROW_HEIGHT = 46; // of one on a phone, where names take several lines
const phone = matchMedia("(max-width: 600px)");
const PADDING = "0.8rem"; // of a cell and of the button in it, both sides together
const OVERSCAN = 12; // rows drawn above and below what is seen

/** A table of which only the rows in sight exist. One stop for Tab; arrows, Home, End and Page keys move inside.

Columns are {heading, width (in characters, or as CSS), number, header (row header), sort (its name, if it sorts), cell(row), shade(row) (a class)}; the
first two stay in sight where `fixed` says so, and rows are higher on a phone where `lines` does. */
class Grid {
  static all = [];
  static printing = false; // on paper there is no scrolling: every row is drawn

  static print(printing) {
    Grid.printing = printing;
    for (const grid of Grid.all) if (grid.body) grid.render();
  }

  constructor(label, { onSort = null, rowClass = () => "", fixed = false, lines = false } = {}) {
    Object.assign(this, { onSort, rowClass, lines, rows: [], cursor: { row: 0, column: 0 } });
    Grid.all.push(this);
    this.table = make("table", { role: "grid", "aria-label": label, class: fixed ? "fixed" : null });
    this.viewport = make("div", { class: "viewport", role: "region", "aria-label": `${label}, scrolls`, tabindex: "-1" }, this.table);
    this.top = 0; // where the reader has scrolled to, which a part that is hidden does not say
    this.viewport.addEventListener("scroll", () => ((this.top = this.viewport.scrollTop), this.frame()), { passive: true });
    this.table.addEventListener("keydown", (event) => this.move(event));
    this.table.addEventListener("focusin", (event) => this.follow(event.target));
    new ResizeObserver(() => this.frame()).observe(this.viewport);
  }

  /** Draws these rows; the reader stays where he was in the same table, and goes to its top in one that he ordered anew. */
  show(columns, rows, order) {
    const focused = document.activeElement.closest("thead th");
    const heading = this.table.contains(focused) ? focused.cellIndex : undefined;
    const held = this.body?.contains(document.activeElement);
    const same = rows.length === this.rows.length && rows.every((row, index) => row === this.rows[index]);
    const top = this.keep || same ? this.top : 0;
    this.keep = false;
    this.height = phone.matches && this.lines ? NARROW_HEIGHT : ROW_HEIGHT;
    this.viewport.classList.toggle("narrow", this.height === NARROW_HEIGHT);
    this.rows = rows;
    this.columns = columns;
    const widths = columns.map(({ width }) => (typeof width === "number" ? `(${width}ch + ${PADDING})` : width));
    const cols = widths.map(() => make("col"));
    cols.forEach((col, index) => (col.style.width = `calc(${widths[index]})`));
    this.table.style.width = `max(100%, ${widths.join(" + ")})`;
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.table.setAttribute("aria-colcount", columns.length);
    this.body = make("tbody");
    const head = make("tr", { "aria-rowindex": 1 }, ...columns.map((column) => this.heading(column, order)));
    this.table.replaceChildren(make("colgroup", {}, ...cols), make("thead", {}, head), this.body);
    this.place(this.cursor.row, this.cursor.column);
    this.drawn = null;
    this.body.replaceChildren(this.gap(rows.length)); // as high as all rows, so that it can be scrolled before they exist
    this.viewport.scrollTop = top;
    this.render();
    this.focusCursor(held);
    if (heading !== undefined) head.cells[heading]?.querySelector("button")?.focus();
  }

  /** Moves the cursor to a cell, or to the nearest one that there is. */
  place(row, column) {
    const within = (index, count) => Math.max(0, Math.min(count - 1, index));
    this.cursor = { row: within(row, this.rows.length), column: within(column, this.columns.length) };
  }

  /** Keeps the focus at the cursor where it was inside the table before its rows were drawn anew. */
  focusCursor(held) {
    if (held) (this.target(this.cursor) ?? this.viewport).focus({ preventScroll: true });
  }

  heading(column, order) {
    const kind = column.number ? "n" : null;
    if (!column.sort) return make("th", { scope: "col", class: `plain ${kind ?? ""}`, text: column.heading, title: column.title });
    const direction = order?.column !== column.sort ? "none" : order.down ? "descending" : "ascending";
    const [name, ...length] = column.heading.split(/(?=@)/);
    const button = pressable(name, () => this.onSort(column.sort), { title: column.title });
    button.append(...length.flatMap((text) => [make("wbr"), text])); // a second line where the column is narrow
    return make("th", { scope: "col", class: kind, "aria-sort": direction }, button);
  }

  frame() {
    if (this.waiting || !this.body) return;
    this.waiting = requestAnimationFrame(() => ((this.waiting = null), this.render()));
  }

  render() {
    const height = window.innerHeight; // the table is never taller, and its own height follows from what is drawn
    const seen = Math.floor(this.viewport.scrollTop / this.height);
    const first = Grid.printing ? 0 : Math.max(0, seen - OVERSCAN);
    const last = Grid.printing ? this.rows.length : Math.min(this.rows.length, first + Math.ceil(height / this.height) + 2 * OVERSCAN);
    if (this.drawn?.[0] === first && this.drawn?.[1] === last) return;
    const holds = this.body.contains(document.activeElement);
    this.drawn = [first, last];
    const rows = this.rows.slice(first, last).map((row, index) => this.row(row, first + index));
    this.body.replaceChildren(this.gap(first), ...rows, this.gap(this.rows.length - last));
    this.setStop();
    this.focusCursor(holds);
  }

  gap(rows) {
    const cell = make("td", { colspan: this.columns.length });
    cell.style.height = `${rows * this.height}px`;
    return make("tr", { class: "gap", "aria-hidden": "true", hidden: rows === 0 }, cell);
  }

  row(row, index) {
    const line = make("tr", { "aria-rowindex": index + 2, class: this.rowClass(row) });
    for (const { cell, header, number, shade } of this.columns) {
      const content = cell(row);
      const kind = [number ? "n" : "", shade?.(row) ?? ""].join(" ").trim() || null;
      const title = content instanceof Node ? null : content;
      line.append(make(header ? "th" : "td", { scope: header ? "row" : null, class: kind, title }, content));
    }
    for (const cell of line.cells) (cell.querySelector("button, input") ?? cell).tabIndex = -1;
    return line;
  }

  target({ row, column }) {
    const cell = this.body.querySelector(`tr[aria-rowindex="${row + 2}"]`)?.cells[column];
    return cell ? (cell.querySelector("button, input") ?? cell) : null;
  }

  setStop() {
    this.stop?.setAttribute("tabindex", "-1");
    const [first] = this.drawn;
    const seen = Math.ceil(this.viewport.scrollTop / this.height);
    this.stop = this.target(this.cursor) ??
      this.target({ row: Math.max(first, Math.min(seen, this.rows.length - 1)), column: this.cursor.column });
    this.stop?.setAttribute("tabindex", "0");
  }

  follow(element) {
    const cell = element.closest("tbody td, tbody th");
    if (!cell) return;
    this.cursor = { row: Number(cell.parentElement.getAttribute("aria-rowindex")) - 2, column: cell.cellIndex };
    this.setStop();
  }

  move(event) {
    if (!event.target.closest("tbody") || event.altKey || event.metaKey) return;
    const page = Math.max(1, Math.floor(this.viewport.clientHeight / this.height) - 2);
    const [rows, columns] = [event.ctrlKey ? this.rows.length : 0, this.columns.length];
    const [down, right] = {
      ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
      PageUp: [-page, 0], PageDown: [page, 0], Home: [-rows, -columns], End: [rows, columns],
    }[event.key] ?? []; // prettier-ignore
    if (down === undefined) return;
    event.preventDefault();
    this.place(this.cursor.row + down, this.cursor.column + right);
    this.reveal();
    const target = this.target(this.cursor);
    target?.focus({ preventScroll: true });
    target?.closest("td, th").scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    this.reveal();
  }

  /** Scrolls so that the cursor's row stands below the heading, and draws it. */
  reveal() {
    const top = this.cursor.row * this.height;
    const height = this.viewport.clientHeight - this.table.tHead.offsetHeight - this.height;
    if (top < this.viewport.scrollTop) this.viewport.scrollTop = top;
    else if (top > this.viewport.scrollTop + height) this.viewport.scrollTop = top - height;
    this.render();
  }
}

/** A column of a grid that shows this text of each row and is as wide as these need. */
const gridColumn = (heading, rows, cell, { most, weight, ...more } = {}) =>
  ({ heading, cell, width: widest(heading, rows.map(cell), most, weight), ...more }); // prettier-ignore

const ruler = document.createElement("canvas").getContext("2d");

/** How wide the widest of the texts stands in a table, in widths of a plain digit. */
function widthOf(texts, weight) {
  const measured = (text, bold) => {
    ruler.font = `${bold} 13px ${getComputedStyle(document.body).fontFamily}`;
    return ruler.measureText(text).width;
  };
  return Math.max(0, ...texts.map((text) => measured(text, weight))) / measured("0", 400);
}

/** The width that a column needs, in digits, at most `most`: of its longest texts, or of a line of its heading, in bold. */
function widest(heading, texts, most = 40, weight = 400) {
  const longest = texts.reduce((length, text) => Math.max(length, text.length), 0);
  const long = [...new Set(texts.filter((text) => text.length >= longest - 1))].slice(0, 50);
  return Math.min(most, 0.3 + Math.max(widthOf(heading.split(/(?=@)| /), 600), widthOf(long, weight)));
}
