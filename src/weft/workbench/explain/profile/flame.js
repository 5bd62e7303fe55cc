(() => {
  "use strict";
  const flame = document.currentScript.closest("svg.flame");
  const WIDTH = Number(flame.dataset.width);
  const THIN = Number(flame.dataset.thin);
  const of = (frame) => ({ at: Number(frame.dataset.at), ns: Number(frame.dataset.ns), depth: Number(frame.dataset.depth) });
  const inside = (a, b) => a.at >= b.at && a.at + a.ns <= b.at + b.ns;

  const time = (ns) => {
    const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find(([s]) => ns >= s * 0.9995) ?? [1, "ns"];
    return `${Number((ns / size).toPrecision(3))} ${unit}`;
  };

  /* The frame and those beneath it are scaled to the whole width; its callers fill the width too. */
  const zoom = (lane, target) => {
    const to = of(target);
    for (const frame of lane.querySelectorAll(".frame")) {
      const one = of(frame);
      const within = one.depth >= to.depth && inside(one, to);
      const around = one.depth < to.depth && inside(to, one);
      frame.classList.toggle("away", !within && !around);
      const x = around ? 0 : ((one.at - to.at) / to.ns) * WIDTH;
      const width = around ? WIDTH : (one.ns / to.ns) * WIDTH;
      frame.setAttribute("x", x.toFixed(3));
      frame.setAttribute("width", width.toFixed(3));
      frame.classList.toggle("thin", width < THIN);
    }
    for (const tick of lane.querySelectorAll("[data-share]")) tick.textContent = time(to.ns * Number(tick.dataset.share));
  };

  const focus = (lane, frame) => {
    for (const other of lane.querySelectorAll('[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    frame.setAttribute("tabindex", "0");
    frame.focus();
  };

  /* Arrow keys: down to the first frame beneath, up to the caller, left and right to the neighbours. */
  const next = (lane, from, key) => {
    const here = of(from);
    const shown = [...lane.querySelectorAll(".frame:not(.away)")].map((f) => [f, of(f)]);
    if (key === "ArrowDown") {
      const below = shown.filter(([, f]) => f.depth === here.depth + 1 && inside(f, here));
      return below.sort((a, b) => a[1].at - b[1].at)[0]?.[0];
    }
    if (key === "ArrowUp") return shown.find(([, f]) => f.depth === here.depth - 1 && inside(here, f))?.[0];
    const row = shown.filter(([, f]) => f.depth === here.depth).sort((a, b) => a[1].at - b[1].at);
    return row[row.findIndex(([f]) => f === from) + (key === "ArrowRight" ? 1 : -1)]?.[0];
  };

  for (const lane of flame.querySelectorAll(".frames")) {
    const root = lane.querySelector(".root");
    lane.addEventListener("click", (event) => {
      const frame = event.target.closest(".frame");
      if (frame) zoom(lane, frame);
    });
    lane.addEventListener("keydown", (event) => {
      const frame = event.target.closest(".frame");
      if (!frame) return;
      if (event.key === "Enter" || event.key === " ") zoom(lane, frame);
      else if (event.key === "Escape") { zoom(lane, root); focus(lane, root); }
      else if (event.key.startsWith("Arrow")) {
        const other = next(lane, frame, event.key);
        if (other) focus(lane, other);
      } else return;
      event.preventDefault();
    });
  }

  const field = flame.querySelector("input");
  const matches = flame.querySelector(".matches");
  field.addEventListener("input", () => {
    const text = field.value.trim().toLowerCase();
    const shares = [];
    for (const lane of flame.querySelectorAll(".frames")) {
      const hits = [];
      for (const frame of lane.querySelectorAll(".frame")) {
        const hit = text !== "" && frame.dataset.name.toLowerCase().includes(text);
        frame.classList.toggle("hit", hit);
        if (hit) hits.push(of(frame));
      }
      /* A match inside another match is not counted twice. */
      const outer = hits.filter((a) => !hits.some((b) => b.depth < a.depth && inside(a, b)));
      const ns = outer.reduce((sum, one) => sum + one.ns, 0);
      const whole = of(lane.querySelector(".root")).ns;
      if (text) shares.push(`${lane.dataset.lane}: ${((100 * ns) / whole).toFixed(1)} %`);
    }
    matches.textContent = shares.join(", ");
  });
  flame.classList.add("live");
})();
