"use strict";
// The parts of a report that answer to the reader: the curves, and tables that sort by a click.

const charts = JSON.parse(document.getElementById("data").textContent);
for (const [place, host] of [...document.querySelectorAll(".curves")].entries()) {
  new LineChart(host, charts[place]).show(charts[place].series);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = element("button", { type: "button", title: "Sort by this column" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
      const value = (row) => Number.parseFloat(row.cells[column].dataset.value);
      const rows = [...body.rows].sort((a, b) => sign * ((value(a) || 0) - (value(b) || 0)));
      body.append(...rows);
    });
  }
}
