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

// A slider shows each layer's values at its step: orange above 1 (full at 2 or the largest), blue
// below. All sliders of as many steps move together.
const sliders = [];
for (const figure of document.querySelectorAll("figure.steps")) {
  const { steps, rows } = JSON.parse(figure.querySelector("script").textContent);
  const slider = figure.querySelector("input");
  const values = Object.values(rows).flat(2).filter((value) => value !== null);
  const top = Math.max(2, ...values);
  const show = () => {
    figure.querySelector("output").textContent = steps[slider.value];
    Object.values(rows).forEach((layers, row) => {
      layers.forEach((layer, index) => {
        const cell = figure.querySelector("tbody").rows[row].cells[index + 1];
        const value = layer[slider.value];
        cell.textContent = value === null ? "\u2013" : value.toFixed(2);
        const over = value === null ? 0 : value < 1 ? value - 1 : (value - 1) / (top - 1);
        const share = Math.round(100 * Math.abs(over));
        const colour = over < 0 ? "#3b86d1" : "#dd7330";
        cell.style.background = `color-mix(in srgb, ${colour} ${share}%, transparent)`;
      });
    });
  };
  sliders.push({ slider, show });
  slider.addEventListener("input", () => {
    for (const other of sliders.filter((each) => each.slider.max === slider.max)) {
      other.slider.value = slider.value;
      other.show();
    }
  });
  show();
}
