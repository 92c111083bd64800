"use strict";
(() => {
  // Without this script the page is complete; it only adds what can be done to it.
  const words = new Intl.Collator("en", { numeric: true });
  const nothing = new Set(["", "–"]);

  const button = (text, name) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = name;
    made.textContent = text;
    return made;
  };

  // A click on a header sorts by it, a second click the other way round; what is not known stays at the end.
  const sort = (table, header) => {
    const descending = header.getAttribute("aria-sort") === "ascending";
    const numeric = header.classList.contains("n");
    const column = header.cellIndex;
    const value = (row) => {
      const text = row.cells[column].textContent.trim();
      if (nothing.has(text)) return null;
      return numeric ? parseFloat(text.replaceAll("−", "-").replaceAll(",", "")) : text;
    };
    const compare = (one, other) => (numeric ? one - other : words.compare(one, other));
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row) => ({ row, value: value(row) }));
    rows.sort((one, other) => {
      if (one.value === null || other.value === null) return (one.value === null) - (other.value === null);
      return descending ? compare(other.value, one.value) : compare(one.value, other.value);
    });
    body.append(...rows.map(({ row }) => row));
    for (const one of table.tHead.rows[0].cells) one.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  };

  for (const table of document.querySelectorAll("table")) {
    for (const header of table.tHead.rows[0].cells) {
      const made = button(header.textContent, "sort");
      made.addEventListener("click", () => sort(table, header));
      header.replaceChildren(made);
      header.setAttribute("aria-sort", "none");
    }
  }

  for (const command of document.querySelectorAll(".command")) {
    const text = command.querySelector("pre");
    const made = button("Copy", "copy");
    made.setAttribute("aria-live", "polite");
    made.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text.textContent);
        made.textContent = "Copied";
      } catch {
        // No clipboard for this page: the command is selected, and Ctrl-C does the rest.
        getSelection().selectAllChildren(text);
        made.textContent = "Selected";
      }
      setTimeout(() => (made.textContent = "Copy"), 2000);
    });
    command.append(made);
  }

  // On a phone a figure fits the screen; enlarged, it scrolls inside its panel.
  for (const panel of document.querySelectorAll(".panel")) {
    const made = button("Enlarge", "enlarge");
    made.setAttribute("aria-pressed", "false");
    made.addEventListener("click", () => {
      const large = panel.classList.toggle("large");
      made.setAttribute("aria-pressed", String(large));
      panel.tabIndex = large ? 0 : -1;
    });
    panel.after(made);
  }
})();
