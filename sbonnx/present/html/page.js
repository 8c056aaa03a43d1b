"use strict";
(function () {
  const FEW = 8; // tables with fewer rows have no filter
  const MANY = 7; // tables with more columns become cards on tablets too

  function value(row, column) {
    let cell = null;
    for (const one of row.cells) {
      if (column < one.colSpan) { cell = one; break; }
      column -= one.colSpan;
    }
    if (!cell || cell.colSpan > 1) return null;
    const raw = cell.dataset.v;
    if (raw === undefined) return cell.textContent.trim().toLowerCase();
    if (raw === "") return null;
    const number = Number(raw.replace("inf", "Infinity"));
    return Number.isNaN(number) ? null : number;
  }

  // Rows without a figure sort last in both directions.
  function compare(a, b, way) {
    if (a === null || b === null) return (a === null) - (b === null);
    return way * (typeof a === "number" && typeof b === "number" ? a - b || 0 : String(a).localeCompare(String(b), "en", { numeric: true }));
  }

  function sortable(table) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
        rows.sort((a, b) => compare(a[0], b[0], up ? 1 : -1));
        table.tBodies[0].append(...rows.map((pair) => pair[1]));
      });
    });
  }

  function filterable(table) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < FEW) return;
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const tools = document.createElement("div");
    tools.className = "tools";
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter rows";
    input.setAttribute("aria-label", "Filter rows: " + (table.getAttribute("aria-label") || "table"));
    const shown = document.createElement("output");
    let status = "";
    function apply() {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      for (const row of rows) {
        const text = texts.get(row);
        row.hidden = !((!status || row.dataset.status === status) && words.every((word) => text.includes(word)));
        left += !row.hidden;
      }
      shown.textContent = left === rows.length ? "" : left + " of " + rows.length + " rows";
    }
    input.addEventListener("input", apply);
    tools.append(input);
    if (table.classList.contains("statuses")) {
      const found = [...new Set(rows.map((row) => row.dataset.status))];
      if (found.length > 1) tools.append(...chips(["", ...found], (chosen) => { status = chosen; apply(); }));
    }
    tools.append(shown);
    table.parentElement.before(tools);
  }

  // On narrow screens a row is a card, and each cell is labelled with the head of its column.
  function cards(table) {
    const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
    const narrow = matchMedia("(max-width: " + (heads.length > MANY ? 1000 : 640) + "px)");
    const apply = () => table.classList.toggle("cards", narrow.matches);
    for (const row of table.tBodies[0].rows) {
      let column = 0;
      for (const cell of row.cells) {
        cell.dataset.label = cell.colSpan > 1 || table.tHead.rows[0].cells[column].classList.contains("quiet") ? "" : heads[column];
        column += cell.colSpan;
      }
    }
    narrow.addEventListener("change", apply);
    apply();
  }

  function chips(names, choose) {
    const buttons = names.map((name) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name || "all";
      button.setAttribute("aria-pressed", String(!name));
      button.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        choose(name);
      });
      return button;
    });
    return buttons;
  }

  // Open the section that contains the link target: not every browser does.
  function unfold() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const folded = target.closest("details");
    if (folded && !folded.open) {
      folded.open = true;
      target.scrollIntoView();
    }
  }

  document.querySelectorAll("table:not(.heat, .narrow)").forEach(cards);
  document.querySelectorAll("table.sorts").forEach(sortable);
  document.querySelectorAll("table.filters").forEach(filterable);
  addEventListener("hashchange", unfold);
  unfold();
})();
