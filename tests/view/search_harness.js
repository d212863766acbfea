// Runs the script of a page over a small stand-in of a document, and prints what each step of a user shows.
// Input: {"page": [tag, attributes, text, children], "script": text, "steps": [["type", text] | ["click", title]]}.

class Element {
  constructor(tag) {
    Object.assign(this, { tagName: tag, className: "", dataset: {}, attributes: {}, children: [], listeners: {}, parent: null, own: "" });
    this.hidden = false;
    this.value = "";
    this.classList = { add: (name) => { this.className += ` ${name}`; } };
  }
  get textContent() { return this.own + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.own = text; this.children = []; }
  get rows() { return this.children.filter((child) => child.tagName === "tr"); }
  get cells() { return this.children; }
  get firstElementChild() { return this.children[0]; }
  setAttribute(name, value) { this.attributes[name] = value; }
  removeAttribute(name) { delete this.attributes[name]; }
  adopt(child) { child.remove(); child.parent = this; return child; }
  append(...added) { for (const child of added) { this.adopt(child); this.children.push(child); } }
  prepend(...added) { added.forEach((child) => this.adopt(child)); this.children.unshift(...added); }
  replaceChildren(...added) { this.children = []; this.append(...added); }
  remove() { if (this.parent) this.parent.children = this.parent.children.filter((child) => child !== this); this.parent = null; }
  after(added) { const at = this.parent.children.indexOf(this); this.parent.adopt(added); this.parent.children.splice(at + 1, 0, added); }
  addEventListener(name, listener) { (this.listeners[name] ??= []).push(listener); }
  fire(name) { for (const listener of this.listeners[name] ?? []) listener({ key: "", stopPropagation() {} }); }
  part(tag) { const made = new Element(tag); this.append(made); return made; }
  createTHead() { return this.part("thead"); }
  createTBody() { return this.part("tbody"); }
  insertRow() { return this.part("tr"); }
  has(selector) {
    const [tag, ...names] = selector.split(".");
    return (!tag || tag === this.tagName) && names.every((name) => this.className.split(" ").includes(name));
  }
  matches(selector) {
    const [own, above] = selector.split(" > ").reverse();
    return this.has(own) && (!above || Boolean(this.parent?.has(above)));
  }
  *below() { for (const child of this.children) { yield child; yield* child.below(); } }
  querySelectorAll(selectors) { return [...this.below()].filter((each) => selectors.split(", ").some((one) => each.matches(one))); }
  querySelector(selectors) { return this.querySelectorAll(selectors)[0] ?? null; }
  closest(selector) { return this.matches(selector) ? this : this.parent?.closest(selector) ?? null; }
}

const made = ([tag, attributes, text, children]) => {
  const element = new Element(tag);
  element.own = text;
  element.className = attributes.class ?? "";
  for (const child of children) element.append(made(child));
  return element;
};

const input = JSON.parse(require("fs").readFileSync(0, "utf8"));
const page = made(input.page);
const current = page.children.at(-1);
globalThis.document = {
  currentScript: current,
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  querySelectorAll: (selector) => page.querySelectorAll(selector),
};
for (const _ of [1, 2]) new Function(input.script)();  // a page that is shown twice runs it twice

const find = page.querySelector(".find");
const shown = () => {
  const results = find.children.find((child) => child.className === "scroll");
  const tables = results ? [results] : [find.querySelector(".still")];
  const rows = tables[0].hidden ? [] : tables[0].querySelector("tbody").rows.filter((row) => !row.hidden);
  return { rows: rows.map((row) => row.cells.map((cell) => cell.textContent)), still: !find.querySelector(".still").hidden };
};
const steps = input.steps.map(([action, text]) => {
  if (action === "type") {
    find.querySelector(".box").value = text;
    find.querySelector(".box").fire("input");
  } else if (action === "sort") {
    find.querySelectorAll("th").find((cell) => cell.textContent === text).fire("click");
  } else {
    find.querySelectorAll("tr").find((row) => row.cells[0].textContent === text).fire("click");
  }
  return shown();
});
console.log(JSON.stringify({ boxes: page.querySelectorAll(".box").length, steps }));
