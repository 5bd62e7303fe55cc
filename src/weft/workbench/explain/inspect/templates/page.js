"use strict";
// Lines that came from one another are marked together: an instruction names its source and PTX lines.
for (const section of document.querySelectorAll(".kernel")) {
  const columns = [...section.querySelectorAll("ol")];
  const lines = (name) => [...section.querySelectorAll(`[data-column="${name}"] > [data-key]`)];
  const code = lines("sass").map((item) => ({
    item,
    source: item.dataset.source.split(" ").filter(Boolean),
    ptx: item.dataset.ptx,
  }));
  const byKey = Object.fromEntries(
    ["source", "ptx"].map((name) => [name, new Map(lines(name).map((l) => [l.dataset.key, l]))]),
  );
  let pinned = false;

  const linked = (item) => {
    const column = item.parentElement.dataset.column;
    const key = item.dataset.key;
    const related = code.filter((one) =>
      column === "sass" ? one.item === item
        : column === "ptx" ? one.ptx === key : one.source.includes(key));
    const marked = new Set([item]);
    for (const one of related) {
      marked.add(one.item);
      marked.add(byKey.ptx.get(one.ptx));
      // A source line marks its own instructions; an instruction marks the whole chain of inlined calls.
      if (column !== "source") one.source.forEach((k) => marked.add(byKey.source.get(k)));
    }
    marked.delete(undefined);
    return marked;
  };
  const clear = () => section.querySelectorAll(".on, .here")
    .forEach((item) => item.classList.remove("on", "here"));
  const mark = (item) => {
    clear();
    item.classList.add("here");
    linked(item).forEach((one) => one.classList.add("on"));
  };
  const show = (item) => {
    for (const column of columns) {
      const first = column === item.parentElement ? item : column.querySelector(".on");
      if (!first) continue;
      const top = first.offsetTop - column.offsetTop;
      const inView = top >= column.scrollTop && top < column.scrollTop + column.clientHeight - 20;
      if (!inView) column.scrollTop = Math.max(0, top - column.clientHeight / 3);
    }
  };
  const lineOf = (event) => event.target.closest("[data-key]");

  section.addEventListener("pointerover", (event) => {
    const item = lineOf(event);
    if (item && !pinned) mark(item);
  });
  section.addEventListener("pointerleave", () => { if (!pinned) clear(); });
  section.addEventListener("click", (event) => {
    const item = lineOf(event);
    if (!item) return;
    pinned = !(pinned && item.classList.contains("here"));
    mark(item);
    if (pinned) show(item);
  });
  section.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { pinned = false; clear(); return; }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const column = event.target.closest("ol");
    if (!step || !column) return;
    event.preventDefault();
    const all = [...column.querySelectorAll("[data-key]")];
    const at = all.findIndex((item) => item.classList.contains("here"));
    const item = all[Math.min(all.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
    pinned = true;
    mark(item);
    show(item);
  });
}
