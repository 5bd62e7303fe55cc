"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Theme: auto, light, dark; remembered where the browser allows it.
  const themes = ["auto", "light", "dark"];
  const theme = document.getElementById("theme");
  const remember = (value) => {
    try {
      if (value) localStorage.setItem("weft-theme", value);
      return localStorage.getItem("weft-theme");
    } catch {
      return value ?? null; // a file page may have no storage; the toggle works all the same
    }
  };
  const wear = (name) => {
    if (name === "auto") delete root.dataset.theme;
    else root.dataset.theme = name;
    theme.textContent = `Theme: ${name}`;
  };
  let worn = themes.includes(remember()) ? remember() : "auto";
  wear(worn);
  theme.addEventListener("click", () => {
    worn = themes[(themes.indexOf(worn) + 1) % themes.length];
    remember(worn);
    wear(worn);
  });

  // Sorting: numbers by data-value, text by the reader's language, empty cells always last.
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
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((h) => h.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [value(row, column), row]);
        const missing = (v) => v === null || v === "";
        rows.sort(([a], [b]) => {
          if (missing(a) || missing(b)) return missing(a) - missing(b);
          return up ? compare(a, b) : compare(b, a);
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  });

  // Filter: every word must stand somewhere in the row.
  all(".filter input").forEach((input) => {
    const rows = all("tbody tr", document.getElementById(input.getAttribute("aria-controls")));
    const told = input.parentElement.querySelector("output");
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row) => {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      });
      told.textContent = words.length ? `${shown} of ${rows.length}` : "";
    });
  });

  // Backends: press a chip to hide its marks, bars and rows.
  all("[data-toggle]").forEach((chip) => {
    chip.addEventListener("click", () => {
      const hidden = root.classList.toggle(`hide-${chip.dataset.toggle}`);
      chip.setAttribute("aria-pressed", String(!hidden));
    });
  });

  // Marks: a tip on hover and focus, and one tab stop a plot with the arrow keys inside.
  const tip = document.getElementById("tip");
  let told = null;
  const show = (mark) => {
    told = mark;
    tip.textContent = mark.getAttribute("aria-label");
    tip.hidden = false;
    const at = mark.querySelector("path").getBoundingClientRect();
    const room = root.clientWidth - tip.offsetWidth - 8;
    const left = Math.max(8, Math.min(room, at.left + at.width / 2 - tip.offsetWidth / 2));
    const above = at.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
  };
  const hide = () => {
    told = null;
    tip.hidden = true;
  };
  all("[data-roving]").forEach((plot) => {
    const marks = all(".mark", plot);
    if (!marks.length) return;
    const visible = () => marks.filter((m) => getComputedStyle(m).display !== "none");
    const stop = (mark) => marks.forEach((m) => m.setAttribute("tabindex", m === mark ? 0 : -1));
    stop(marks[0]);
    marks.forEach((mark) => {
      mark.querySelector("title")?.remove(); // the label stays; two tips at once would not do
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
  addEventListener("scroll", () => told && show(told), { passive: true });
})();
