// Search boxes and sortable columns for the tables of one page. It has neither "less than" nor "and" signs, so that a
// page is XML, too, and it makes all elements itself: without scripts a page has no box that does nothing.
(() => {
  const near = document.currentScript?.closest(".reshard-output");
  const pages = near ? [near] : document.querySelectorAll(".reshard-output");
  const MOST = 200;
  const units = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, s: 1, min: 60, h: 3600, d: 86400 };

  const element = (name, text, kind) => {
    const made = document.createElement(name);
    made.textContent = text;
    made.className = kind;
    return made;
  };

  const worth = (text) => {
    if (/^\[[\d, ]*\]$/.test(text)) return (text.match(/\d+/g) ?? []).reduce((product, extent) => product * extent, 1);
    const parts = /^(-?[\d,]*\.?\d+(?:e[-+]?\d+)?)\s?(kB|MB|GB|TB|B|s|min|h|d)?$/.exec(text);
    return parts ? parseFloat(parts[1].replaceAll(",", "")) * (units[parts[2]] ?? 1) : NaN;
  };

  const compared = (one, other) => {
    const [a, b] = [worth(one), worth(other)];
    if (isNaN(a) || isNaN(b)) return one.localeCompare(other, undefined, { numeric: true });
    return a - b;
  };

  const matcher = (query) => {
    const terms = query.toLowerCase().split(/\s+/).filter(Boolean).map((term) => {
      const parts = term.split("*").map((part) => part.replace(/[^\w]/g, (sign) => "\\" + sign));
      return new RegExp(parts.join(".*"));
    });
    return (cells) => {
      const text = cells.join("\t").toLowerCase();
      return terms.every((term) => term.test(text));
    };
  };

  // Rows that differ in numbers only are one template and their numbers: "layers.", ".w" and "0;1;2".
  const unpacked = (groups) => groups.flatMap(([parts, numbers]) => numbers.split(";").map((item) => {
    const digits = item.split(",");
    return parts.reduce((text, part, at) => text + digits[at - 1] + part).split("\t");
  }));

  const wire = (find) => {
    const stored = find.querySelector("script");
    const data = stored ? JSON.parse(stored.textContent) : null;
    const still = find.querySelector(".still");
    const body = data ? null : still.querySelector("tbody");
    const rows = data ? unpacked(data.groups) : Array.from(body.rows, (row) => Array.from(row.cells, (cell) => cell.textContent));
    const inPlace = data ? [] : Array.from(body.rows);
    const header = data ? data.header : Array.from(still.querySelectorAll("th"), (cell) => cell.textContent);
    let column = -1;
    let falling = false;

    const box = element("input", "", "box");
    box.type = "search";
    box.placeholder = `search ${rows.length.toLocaleString("en")} rows`;
    box.setAttribute("aria-label", box.placeholder);
    const count = element("span", "", "more");
    const bar = element("div", "", "bar-of-search");
    bar.append(box, count);
    find.prepend(bar);

    const titled = [];
    const clickable = (cell, at) => {
      cell.classList.add("sortable");
      cell.tabIndex = 0;
      cell.title = "sort by this column";
      const sort = () => {
        if (column === at) {
          if (falling) column = -1;
          falling = !falling;
        } else {
          column = at;
          falling = false;
        }
        show();
      };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => event.key === "Enter" ? sort() : null);
      titled.push([cell, at]);
    };
    for (const cell of still.querySelectorAll("th")) {
      const at = header.indexOf(cell.textContent);
      if (at >= 0) clickable(cell, at);
    }

    let results = null;
    if (data) {
      results = element("div", "", "scroll");
      results.hidden = true;
      const table = document.createElement("table");
      const head = table.createTHead().insertRow();
      header.forEach((title, at) => {
        const cell = element("th", title, data.kinds[at]);
        clickable(cell, at);
        head.append(cell);
      });
      table.createTBody();
      results.append(table);
      still.after(results);
    }

    const details = (cells) => {
      const row = document.createElement("tr");
      const cell = element("td", "", "detail");
      cell.colSpan = header.length;
      const [id, width, height] = (cells[header.length] ?? "").split(" ");
      if (width) {
        const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
        const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
        use.setAttribute("href", "#" + id);
        svg.setAttribute("width", width);
        svg.setAttribute("height", height);
        svg.append(use);
        cell.append(svg);
      }
      for (const code of data.code) cell.append(element("code", code.replace("NAME", () => JSON.stringify(cells[0])), ""));
      row.append(cell);
      return row;
    };

    const drawn = (cells) => {
      const row = document.createElement("tr");
      header.forEach((_, at) => row.append(element("td", cells[at], data.kinds[at])));
      if (data.code.length) {
        row.classList.add("sortable");
        row.tabIndex = 0;
        let opened = null;
        const toggle = () => {
          if (opened) {
            opened.remove();
            opened = null;
          } else {
            opened = details(cells);
            row.after(opened);
          }
        };
        row.addEventListener("click", toggle);
        row.addEventListener("keydown", (event) => event.key === "Enter" ? toggle() : null);
      }
      return row;
    };

    const show = () => {
      const query = box.value.trim();
      const matches = matcher(query);
      const chosen = rows.map((_, number) => number).filter((number) => matches(rows[number]));
      if (column >= 0) {
        const sign = falling ? -1 : 1;
        chosen.sort((a, b) => sign * compared(rows[a][column], rows[b][column]));
      }
      for (const [cell, at] of titled) {
        if (at === column) cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      }
      const active = Boolean(query) || column >= 0;
      const rest = data ? (active ? chosen.length - MOST : 0) : 0;
      const found = query ? `${chosen.length.toLocaleString("en")} found` : "";
      const more = rest > 0 ? `the first ${MOST} are shown` : "";
      const beyond = query ? data?.beyond ?? "" : "";
      count.textContent = [found, more, beyond].filter(Boolean).join("; ");
      if (data) {
        still.hidden = active;
        results.hidden = !active;
        results.querySelector("tbody").replaceChildren(...(active ? chosen.slice(0, MOST).map((number) => drawn(rows[number])) : []));
      } else {
        inPlace.forEach((row) => { row.hidden = true; });
        chosen.forEach((number) => {
          inPlace[number].hidden = false;
          body.append(inPlace[number]);
        });
      }
    };
    box.addEventListener("input", show);
    box.addEventListener("keydown", (event) => event.stopPropagation());
  };

  for (const page of pages) {
    for (const find of page.querySelectorAll(".find")) {
      if (find.dataset.ready) continue;
      find.dataset.ready = "yes";
      wire(find);
    }
  }
})();
