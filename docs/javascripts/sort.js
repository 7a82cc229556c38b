// Tables inside of <div class="sortable"> are sorted by the column whose header is clicked; a second
// click turns the order round. Cells are compared by their first number, or as text.
document.addEventListener("DOMContentLoaded", () => {
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    const number = text.match(/-?\d+(\.\d+)?/);
    const word = text === "–" ? -Infinity : text.toLowerCase(); // no number is below all numbers
    return number ? Number(number[0]) : word;
  };
  for (const table of document.querySelectorAll(".sortable table")) {
    const body = table.tBodies[0];
    Array.from(table.tHead.rows[0].cells).forEach((header, column) => {
      let order = 1;
      header.style.cursor = "pointer";
      header.title = "sort";
      header.addEventListener("click", () => {
        const rows = Array.from(body.rows);
        rows.sort((a, b) => {
          const [one, other] = [value(a, column), value(b, column)];
          return one < other ? -order : one > other ? order : 0;
        });
        order = -order;
        body.append(...rows);
      });
    });
  }
});
