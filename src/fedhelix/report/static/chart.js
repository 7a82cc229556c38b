"use strict";
// A line chart in plain SVG: choose what is on each axis, hide lines, read values under the pointer.
// Text from runs only ever becomes text nodes, never markup.

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function shape(name, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

const lookOf = (place) => `c${place % 7} d${place % 6}`;
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function figure(value, percent) {
  if (!isNumber(value)) return "–";
  if (percent) return `${(100 * value).toFixed(1)} %`;
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-GB") : String(Number(value.toPrecision(3)));
}

// A tick: a round number, which keeps all its digits, so that neighbours differ.
const mark = (value) => (Math.abs(value) >= 1000 ? figure(value) : String(Number(value.toPrecision(10))));

// Round steps of at least `least`, at most `most` of them, unless only one would be left.
function ticks(low, high, most, least = 0) {
  const power = Math.max(10 ** Math.floor(Math.log10((high - low || 1) / most)), least);
  let values = [];
  for (const step of [1, 2, 5, 10].map((factor) => factor * power)) {
    const coarser = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) coarser.push(Number((n * step).toPrecision(12)));
    if (values.length > 1 && coarser.length < 2) break;
    values = coarser;
    if (values.length <= most) break;
  }
  return values;
}

// Steps of a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone where that is too many.
function powers(low, high, most) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const all = [];
  for (let power = from; power <= to; power++) for (const factor of [1, 2, 5]) all.push(Number((factor * 10 ** power).toPrecision(12)));
  const inside = all.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length <= most ? inside : inside.filter((value) => /^[0.]*10*$/.test(String(value)));
}

// The units of simulated time, each with how many make an hour; the longest time shall be at least so many.
const UNITS = [["hours", 1], ["minutes", 60], ["seconds", 3600]];
const ENOUGH = 3;

const FAR_APART = 5; // times: totals that differ by more are drawn on a logarithmic axis

class LineChart {
  // axes: [{key, label}]; measures: [{key, label, percent}];
  // series: [{label, place, x: {axis: [...]}, y: {measure: {mid, low, high}}, arrival}], the last one the first round of newcomers
  constructor(host, { axes, measures, height = 340 }) {
    Object.assign(this, { host, measures, height, series: null, hidden: new Set() }); // no series: they are still to come
    this.axes = axes.map((axis) => ({ ...axis, times: 1 }));
    this.axis = this.axes[0];
    this.measure = measures[0];
    this.pickers = element("div", { class: "pickers" });
    this.legend = element("div", { class: "legend", role: "group", "aria-label": "Lines shown" });
    this.canvas = element("div", { class: "canvas" });
    this.tip = element("div", { class: "tip", hidden: true, role: "status" });
    host.replaceChildren(this.pickers, this.legend, this.canvas, this.tip);
    host.classList.add("chart");
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(series) {
    this.series = series;
    const clock = this.axes.find((axis) => axis.key === "hours");
    if (clock) this.measureTime(clock);
    const known = this.measures.filter((measure) => series.some((one) => one.y[measure.key]));
    if (known.length && !known.includes(this.measure)) this.measure = known[0];
    const axes = this.axes.filter((axis) => series.some((one) => one.x[axis.key]));
    if (axes.length && !axes.includes(this.axis)) this.axis = axes[0];
    const choices = [["Show", known, "measure"], ["against", axes, "axis"]].filter(([, many]) => many.length > 1);
    this.pickers.replaceChildren(...choices.map(([word, many, field]) => this.picker(word, many, field)));
    this.legend.replaceChildren(...(series.length > 1 ? series.map((one) => this.key(one)) : []));
    this.draw();
  }

  // Simulated time in the unit in which it is a small number but no fraction.
  measureTime(clock) {
    const longest = Math.max(...this.series.map((one) => (one.x.hours || []).filter(isNumber).at(-1) ?? 0));
    const [unit, times] = UNITS.find(([, times]) => longest * times >= ENOUGH) || UNITS.at(-1);
    Object.assign(clock, { label: `simulated ${unit}`, times });
  }

  picker(word, choices, field) {
    const buttons = choices.map((choice) =>
      element("button", {
        type: "button", "aria-pressed": String(this[field] === choice),
        onclick: () => { this[field] = choice; this.show(this.series); },
      }, choice.label));
    return element("div", { class: "picker", role: "group", "aria-label": word }, element("span", {}, word), ...buttons);
  }

  key(one) {
    const line = shape("svg", { viewBox: "0 0 30 10", class: lookOf(one.place), "aria-hidden": "true" });
    line.append(shape("path", { d: "M1 5H29", class: "line" }));
    return element("button", {
      type: "button", title: "Show or hide", "aria-pressed": String(!this.hidden.has(one.label)),
      onclick: () => {
        if (!this.hidden.delete(one.label)) this.hidden.add(one.label);
        this.show(this.series);
      },
    }, line, one.label);
  }

  // The points of one line: [x, mid, low, high], without those that have no value.
  points(one) {
    const values = one.y[this.measure.key];
    const places = one.x[this.axis.key];
    if (!values || !places) return [];
    return values.mid
      .map((mid, i) => [places[i], mid, values.low ? values.low[i] : mid, values.high ? values.high[i] : mid])
      .filter((point) => point.every(isNumber))
      .map(([place, ...rest]) => [this.axis.times * place, ...rest]);
  }

  draw() {
    const width = Math.max(this.canvas.clientWidth, 240);
    const { height } = this;
    const drawn = (this.series || [])
      .filter((one) => !this.hidden.has(one.label))
      .map((one) => ({ one, points: this.points(one) }))
      .filter(({ points }) => points.length);
    const svg = shape("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "aria-label": `${this.measure.label} against ${this.axis.label}`,
    });
    this.canvas.replaceChildren(svg);
    if (!drawn.length) {
      svg.append(shape("text", { x: width / 2, y: height / 2, class: "empty" }, this.series ? "nothing evaluated yet" : "loading …"));
      return;
    }
    const every = drawn.flatMap(({ points }) => points);
    const log = this.axis.key !== "round" && farApart(drawn.map(({ points }) => points.at(-1)[0]));
    const scale = log ? Math.log10 : (x) => x;
    const shown = log ? drawn.map(({ one, points }) => ({ one, points: points.filter((point) => point[0] > 0) })) : drawn;
    const [x0, x1] = range(shown.flatMap(({ points }) => points.map((point) => scale(point[0]))), 0);
    const [y0, y1] = range(every.flatMap((point) => [point[2], point[3]]), 0.04, this.measure.percent ? [0, 1] : undefined);
    const frame = { left: 52, right: width - 14, top: 12, bottom: height - 40 };
    const across = (x) => frame.left + ((scale(x) - x0) / (x1 - x0)) * (frame.right - frame.left);
    const up = (y) => frame.bottom - ((y - y0) / (y1 - y0)) * (frame.bottom - frame.top);
    for (const y of ticks(y0, y1, 6)) {
      svg.append(shape("line", { x1: frame.left, x2: frame.right, y1: up(y), y2: up(y), class: "grid" }));
      const words = this.measure.percent ? `${mark(100 * y)} %` : mark(y);
      svg.append(shape("text", { x: frame.left - 8, y: up(y) + 4, class: "tick end" }, words));
    }
    const most = Math.max(3, Math.floor(width / 90));
    for (const x of log ? powers(10 ** x0, 10 ** x1, most) : ticks(x0, x1, most, this.axis.key === "round" ? 1 : 0)) {
      svg.append(shape("line", { x1: across(x), x2: across(x), y1: frame.top, y2: frame.bottom, class: "grid" }));
      svg.append(shape("text", { x: across(x), y: frame.bottom + 17, class: "tick middle" }, mark(x)));
    }
    const before = this.axis.key === "round" ? drawn.map(({ one }) => one.arrival - 1) : [];
    const arrivals = [...new Set(before)].filter((x) => x >= x0 && x <= x1);
    for (const x of arrivals) svg.append(shape("line", { x1: across(x), x2: across(x), y1: frame.top, y2: frame.bottom, class: "arrival" }));
    const meaning = arrivals.length ? " (line: newcomers take over)" : log ? " (logarithmic)" : "";
    svg.append(shape("text", { x: (frame.left + frame.right) / 2, y: height - 6, class: "tick middle" }, this.axis.label + meaning));
    for (const { one, points } of shown) {
      const group = shape("g", { class: lookOf(one.place) });
      if (points.some((point) => point[3] > point[2])) {
        const there = points.map((point) => `${across(point[0])},${up(point[3])}`);
        const back = points.map((point) => `${across(point[0])},${up(point[2])}`).reverse();
        group.append(shape("polygon", { points: [...there, ...back].join(" "), class: "band" }));
      }
      group.append(points.length === 1
        ? shape("circle", { cx: across(points[0][0]), cy: up(points[0][1]), r: 4, class: "dot" })
        : shape("polyline", { points: points.map((point) => `${across(point[0])},${up(point[1])}`).join(" "), class: "line" }));
      svg.append(group);
    }
    const cross = shape("line", { y1: frame.top, y2: frame.bottom, class: "cross", visibility: "hidden" });
    svg.append(cross);
    svg.addEventListener("pointermove", (event) => this.hover(event, { drawn: shown, cross, across, frame, width }));
    svg.addEventListener("pointerleave", () => { this.tip.hidden = true; cross.setAttribute("visibility", "hidden"); });
  }

  hover(event, { drawn, cross, across, frame, width }) {
    const wanted = event.clientX - this.canvas.getBoundingClientRect().left;
    const distance = (point) => Math.abs(across(point[0]) - wanted);
    const nearest = (points) => points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    const rows = drawn.map(({ one, points }) => ({ one, point: nearest(points) })).sort((a, b) => b.point[1] - a.point[1]);
    const x = nearest(rows.map((row) => row.point))[0];
    cross.setAttribute("x1", across(x));
    cross.setAttribute("x2", across(x));
    cross.setAttribute("visibility", "visible");
    this.tip.replaceChildren(
      element("b", {}, `${this.axis.label}: ${figure(x)}`),
      ...rows.map(({ one, point }) => element("div", { class: lookOf(one.place) },
        element("i", { class: "swatch" }), `${figure(point[1], this.measure.percent)}  ${one.label}`)));
    this.tip.hidden = false;
    const left = across(x) + 14;
    this.tip.style.left = `${left + this.tip.offsetWidth > width ? Math.max(0, across(x) - this.tip.offsetWidth - 14) : left}px`;
    this.tip.style.top = `${this.canvas.offsetTop + 12}px`;
  }
}

function farApart(totals) {
  const least = Math.min(...totals);
  return least > 0 && Math.max(...totals) > FAR_APART * least;
}

// The values with some room around them, but never beyond the limits.
function range(values, margin, [least, most] = [-Infinity, Infinity]) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const room = low === high ? 0.5 : margin * (high - low);
  return [Math.max(low - room, least), Math.min(high + room, most)];
}
