"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Theme: auto, light or dark; stored if the browser allows it.
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const stored = (value) => {
    try {
      if (value) localStorage.setItem("weft-theme", value);
      return localStorage.getItem("weft-theme");
    } catch {
      return value ?? null; // a page opened as a file may have no storage; the button still works
    }
  };
  const applyTheme = (name) => {
    if (name === "auto") delete root.dataset.theme;
    else root.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
  };
  let current = themes.includes(stored()) ? stored() : "auto";
  applyTheme(current);
  button.addEventListener("click", () => {
    current = themes[(themes.indexOf(current) + 1) % themes.length];
    stored(current);
    applyTheme(current);
  });

  // Sorting: numbers by data-value, text by the reader's language; empty cells are always last.
  const value = (row, column) => {
    const cell = row.cells[column];
    const raw = cell.dataset.value;
    if (raw === undefined) return cell.textContent.trim();
    return raw === "" ? null : Number(raw);
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), undefined, { numeric: true });
  all("table.sortable").forEach((table) => {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const ascending = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((h) => h.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [value(row, column), row]);
        const missing = (v) => v === null || v === "";
        rows.sort(([a], [b]) => {
          if (missing(a) || missing(b)) return missing(a) - missing(b);
          return ascending ? compare(a, b) : compare(b, a);
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  });

  // Filter: a row is shown if it contains every word.
  all(".filter input").forEach((input) => {
    const rows = all("tbody tr", document.getElementById(input.getAttribute("aria-controls")));
    const output = input.parentElement.querySelector("output");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row) => {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      });
      output.textContent = words.length ? `${shown} of ${rows.length}` : "";
    });
  });

  // Legend: a button hides the marks, bars and rows of its backend.
  all("[data-toggle]").forEach((chip) => {
    chip.addEventListener("click", () => {
      const hidden = root.classList.toggle(`hide-${chip.dataset.toggle}`);
      chip.setAttribute("aria-pressed", String(!hidden));
    });
  });

  // Marks: a tooltip on hover and focus. Each plot is one tab stop; arrow keys move within it.
  const tip = document.getElementById("tip");
  let tipMark = null;
  const show = (mark) => {
    tipMark = mark;
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    const at = mark.querySelector("path").getBoundingClientRect();
    const maxLeft = root.clientWidth - tip.offsetWidth - 8;
    const left = Math.max(8, Math.min(maxLeft, at.left + at.width / 2 - tip.offsetWidth / 2));
    const above = at.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
  };
  const hide = () => {
    tipMark = null;
    tip.hidden = true;
  };
  all("[data-roving]").forEach((plot) => {
    const marks = all(".mark", plot);
    if (!marks.length) return;
    const visible = () => marks.filter((m) => getComputedStyle(m).display !== "none");
    const stop = (mark) => marks.forEach((m) => m.setAttribute("tabindex", m === mark ? 0 : -1));
    stop(marks[0]);
    marks.forEach((mark) => {
      mark.querySelector("title")?.remove(); // the browser would show it as a second tooltip; the label stays
      mark.addEventListener("pointerenter", () => show(mark));
      mark.addEventListener("pointerleave", hide);
      mark.addEventListener("focus", () => (stop(mark), show(mark)));
      mark.addEventListener("blur", hide);
    });
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      const shown = visible();
      const next = shown[shown.indexOf(document.activeElement) + step];
      if (next) next.focus();
      event.preventDefault();
    });
  });
  addEventListener("scroll", () => tipMark && show(tipMark), { passive: true });
})();
