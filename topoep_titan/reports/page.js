// A click on a column's header sorts its table; a second click turns the order. Missing values last.
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const body = head.closest("table").tBodies[0];
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const value = (row) => row.cells[head.cellIndex].dataset.value;
    const compare = (a, b) => {
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      return sign * (head.className === "number" ? a - b : a.localeCompare(b));
    };
    const rows = [...body.rows].sort((a, b) => compare(value(a), value(b)));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
    body.append(...rows);
  });
}
